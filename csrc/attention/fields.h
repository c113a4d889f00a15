// Binds functions of one struct: each field named here is a keyword argument in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "attention/params.h"
#include "attention/tensors.h"
#include "cuda/family.h"

namespace splitkv {

namespace py = pybind11;
using release_gil = py::gil_scoped_release;
struct keep_gil {};

template <typename T>
T* as_pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// What Python passes for a member, and the member made of it: mostly the same.
template <typename Member>
struct Argument {
    using Type = Member;
    static Member read(Member value) { return value; }
};

template <typename T>
struct Argument<T*> {
    using Type = uintptr_t;  // an address
    static T* read(uintptr_t address) { return as_pointer<T>(address); }
};

template <>
struct Argument<Rows> {
    using Type = py::object;  // a tensor, Rows, or None
    static Rows read(const py::object& tensor) {
        return tensor.is_none() ? Rows{} : rows_of(tensor);
    }
};

template <>
struct Argument<cuda::Family> {
    using Type = std::string;  // its name
    static cuda::Family read(const std::string& name) { return cuda::family_from_name(name); }
};

template <typename Struct, typename Member>
struct Field {
    Field(const char* name, Member Struct::* member, bool is_optional = false)
        : name(name), member(member), is_optional(is_optional) {}

    using Arg = Argument<Member>;
    using ArgType = typename Arg::Type;
    py::arg keyword() const { return py::arg(name).none(is_optional); }

    const char* name;
    Member Struct::* member;
    bool is_optional;  // Rows alone: None leaves it empty
};

// `function` of a struct as a function of the fields, which are read before the guard takes over. A
// field not named here is zero.
template <typename Guard, typename Result, typename Struct, typename... Fields>
auto of_fields(Result (*function)(const Struct&), Fields... fields) {
    return [function, fields...](typename Fields::ArgType... values) {
        Struct params{};
        ((params.*fields.member = Fields::Arg::read(values)), ...);
        [[maybe_unused]] const Guard guard{};
        return function(params);
    };
}

template <typename Result, typename Struct, typename... Fields>
void def(py::module_& m, const char* name, Result (*function)(const Struct&), Fields... fields) {
    m.def(name, of_fields<release_gil>(function, fields...), py::kw_only(), fields.keyword()...);
}

template <typename Guard, typename Class, typename Struct, typename... Fields>
void def_init(py::class_<Class>& bound, Class (*make)(const Struct&), Fields... fields) {
    bound.def(py::init(of_fields<Guard>(make, fields...)), py::kw_only(), fields.keyword()...);
}

}  // namespace splitkv
