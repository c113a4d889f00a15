// What the planner deals with: pieces of documents, and what a rank may still take.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/queries.h"

namespace splitkv::planner {

// Consecutive KV tokens [begin, end) of one document. Fewer query rows see later keys, under every
// spec, so a piece is dearest at its front and cheapest at its back.
struct Piece {
    int64_t doc;
    int64_t begin;
    int64_t end;
    int64_t tokens() const { return end - begin; }
};

// A piece that is still to be placed, with its visible pairs.
struct Item {
    Piece piece;
    int64_t cost;
};

// What a rank may still take: tokens exactly, cost as closely as the pieces allow. The cost may
// become negative.
struct Budget {
    int64_t tokens;
    int64_t cost;
};

// Unit of a tolerance, so that no decision is made in floating point.
constexpr int64_t kTolerance = 1000000000;

// Pieces of each rank.
using Placement = std::vector<std::vector<Piece>>;

// value * part / whole, exact in the middle, rounded toward zero.
inline int64_t fraction_of(int64_t value, int64_t part, int64_t whole) {
    int64_t product;
    if (!__builtin_mul_overflow(value, part, &product)) return product / whole;  // much faster
    return static_cast<int64_t>(static_cast<__int128>(value) * part / whole);
}

}  // namespace splitkv::planner
