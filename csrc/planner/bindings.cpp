// Module _planner: the planner in integers. Arrays are int64 numpy arrays; no torch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/check.h"
#include "planner/assign.h"
#include "planner/exchange.h"
#include "planner/queries.h"

namespace py = pybind11;

namespace splitkv::planner {
namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

QueryKind parse_kind(const std::string& name) {
    if (name == "causal") return QueryKind::kCausal;
    if (name == "window") return QueryKind::kWindow;
    if (name == "full") return QueryKind::kFull;
    if (name == "prefix") return QueryKind::kPrefix;
    if (name == "suffix") return QueryKind::kSuffix;
    if (name == "anchors") return QueryKind::kAnchors;
    SPLITKV_CHECK(false, "query spec '", name,
                  "' is unknown; use causal, window, full, prefix, suffix or anchors");
    return QueryKind::kCausal;
}

// Rows of a [n, columns] array as structs of int64 fields; copies. And back: the array owns them.
template <typename Struct>
std::vector<Struct> to_structs(const Int64Array& array, const char* name) {
    constexpr int64_t kColumns = sizeof(Struct) / sizeof(int64_t);
    SPLITKV_CHECK(array.ndim() == 2 && array.shape(1) == kColumns, name, " must be [n, ", kColumns,
                  "], got ", array.ndim(), " dimensions");
    const Struct* rows = reinterpret_cast<const Struct*>(array.data());
    return std::vector<Struct>(rows, rows + array.shape(0));
}

template <typename Struct>
Int64Array to_array(std::vector<Struct> structs) {
    constexpr int64_t kColumns = sizeof(Struct) / sizeof(int64_t);
    const auto num_rows = static_cast<int64_t>(structs.size());
    auto owner = std::make_unique<std::vector<Struct>>(std::move(structs));
    const auto* data = reinterpret_cast<const int64_t*>(owner->data());
    const py::capsule base(owner.get(), [](void* held) {
        std::unique_ptr<std::vector<Struct>>(static_cast<std::vector<Struct>*>(held));
    });
    owner.release();
    return Int64Array({num_rows, kColumns}, data, base);
}

Int64Array row_intervals(const QueryModel& model) {
    Int64Array intervals({model.num_rows(), int64_t{2}});
    int64_t* out = intervals.mutable_data();
    py::gil_scoped_release release;
    for (int64_t doc = 0; doc < model.num_docs(); ++doc) {
        for (int64_t row = 0; row < model.num_rows(doc); ++row) {
            const Range keys = model.visible_keys(doc, row);
            *out++ = model.kv_start(doc) + keys.begin;
            *out++ = model.kv_start(doc) + keys.end;
        }
    }
    return intervals;
}

// Runs, costs and tokens of each rank.
py::tuple assign(const QueryModel& model, const AssignOptions& options) {
    Assignment found;
    std::vector<int64_t> tokens;
    {
        py::gil_scoped_release release;
        found = assign_blocks(model, options);
        tokens.resize(options.cp_size, 0);
        for (const Run& run : found.runs) tokens[run.rank] += run.end - run.begin;
    }
    return py::make_tuple(to_array(std::move(found.runs)), found.costs, tokens);
}

template <typename Struct>
std::vector<Int64Array> to_arrays(std::vector<std::vector<Struct>> lists) {
    std::vector<Int64Array> arrays;
    for (std::vector<Struct>& list : lists) arrays.push_back(to_array(std::move(list)));
    return arrays;
}

std::vector<Int64Array> needed(const QueryModel& model, const Int64Array& runs, int64_t cp_size) {
    const std::vector<Run> list = to_structs<Run>(runs, "runs");
    RowSets rows;
    {
        py::gil_scoped_release release;
        rows = needed_rows(model, list, cp_size);
    }
    return to_arrays(std::move(rows));
}

RowSets to_row_sets(const std::vector<Int64Array>& arrays, const char* name) {
    SPLITKV_CHECK(static_cast<int64_t>(arrays.size()) <= kMaxRanks, name, " are of ", arrays.size(),
                  " ranks; at most ", kMaxRanks, " are counted");
    RowSets rows;
    for (const Int64Array& array : arrays) {
        rows.push_back(to_structs<Range>(array, name));
        for (const Range& range : rows.back()) {
            SPLITKV_CHECK(range.begin >= 0, name, ": [", range.begin, ", ", range.end,
                          ") begins before the stream");
        }
    }
    return rows;
}

Int64Array counts(const std::vector<Int64Array>& owned, const std::vector<Int64Array>& needed) {
    const RowSets has = to_row_sets(owned, "owned"), needs = to_row_sets(needed, "needed");
    std::vector<int64_t> found;
    {
        py::gil_scoped_release release;
        found = row_counts(has, needs);
    }
    Int64Array array({static_cast<int64_t>(has.size()), static_cast<int64_t>(needs.size())});
    std::copy(found.begin(), found.end(), array.mutable_data());
    return array;
}

int64_t pairs_in(const QueryModel& model, int64_t doc, int64_t begin, int64_t end) {
    check_runs(model, {{0, doc, begin, end}}, 1);
    return model.pairs_in(doc, {begin, end});
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
    m.doc() = "Split-KV planner: who sees what, and which rank keeps which KV tokens.";
    py::class_<QueryModel>(m, "QueryModel")
        .def(py::init([](std::vector<int64_t> doc_lens,
                         std::optional<std::vector<int64_t>> padded_lens, const std::string& kind,
                         int64_t size, std::vector<int64_t> anchor_ptr,
                         std::vector<int64_t> anchor_positions) {
                 if (!padded_lens) padded_lens = doc_lens;
                 return QueryModel(
                     std::move(doc_lens), std::move(*padded_lens),
                     {parse_kind(kind), size, std::move(anchor_ptr), std::move(anchor_positions)});
             }),
             py::arg("doc_lens"), py::arg("padded_lens"), py::arg("kind"), py::arg("size") = 0,
             py::arg("anchor_ptr") = std::vector<int64_t>(),
             py::arg("anchor_positions") = std::vector<int64_t>())
        .def_property_readonly("num_tokens", &QueryModel::num_tokens)
        .def_property_readonly("num_rows", py::overload_cast<>(&QueryModel::num_rows, py::const_))
        .def("row_intervals", &row_intervals)
        .def("pairs_in", &pairs_in, py::arg("doc"), py::arg("begin"), py::arg("end"));
    m.attr("TOLERANCE_UNITS") = kTolerance;
    m.attr("MAX_RANKS") = kMaxRanks;
    m.def(
        "assign_blocks",
        [](const QueryModel& model, int64_t cp_size, int64_t block_size, int64_t tolerance,
           int64_t ranks_per_node, int64_t row_cost, int64_t run_cost, std::vector<int64_t> speed) {
            return assign(model, {cp_size, block_size, tolerance,
                                  ranks_per_node > 0 ? ranks_per_node : cp_size, row_cost, run_cost,
                                  std::move(speed)});
        },
        py::arg("model"), py::arg("cp_size"), py::arg("block_size"), py::arg("tolerance"),
        py::arg("ranks_per_node") = 0, py::arg("row_cost") = 0, py::arg("run_cost") = 0,
        py::arg("speed") = std::vector<int64_t>());
    m.def(
        "rank_costs",
        [](const QueryModel& model, const Int64Array& runs, int64_t cp_size) {
            return rank_costs(model, to_structs<Run>(runs, "runs"), cp_size);
        },
        py::arg("model"), py::arg("runs"), py::arg("cp_size"));
    m.def("needed_rows", &needed, py::arg("model"), py::arg("runs"), py::arg("cp_size"));
    m.def("row_counts", &counts, py::arg("owned"), py::arg("needed"));
    m.def(
        "intersect",
        [](const Int64Array& a, const Int64Array& b) {
            return to_array(
                intersect(to_structs<Range>(a, "ranges"), to_structs<Range>(b, "ranges")));
        },
        py::arg("a"), py::arg("b"));
}

}  // namespace splitkv::planner
