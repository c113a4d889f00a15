// The one family of checks. A failed check throws std::invalid_argument (ValueError in Python)
// whose message holds the values that the caller streams in.
#pragma once

#include <sstream>
#include <stdexcept>

namespace splitkv {

template <typename... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    throw std::invalid_argument(message.str());
}

}  // namespace splitkv

// SPLITKV_CHECK(condition, parts...): the parts are joined to the message.
#define SPLITKV_CHECK(condition, ...)                          \
    do {                                                       \
        if (!(condition)) splitkv::throw_invalid(__VA_ARGS__); \
    } while (0)
