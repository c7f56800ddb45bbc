// Tensors from Python, checked: the only way from one to memory leads through here, so no kernel reads or writes a
// tensor whose device, dtype, shape or strides are not what it takes them for.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "arrays.h"
#include "tensor.h"

namespace coterie {

using Shape = std::vector<int64_t>;

constexpr int64_t kMostRows = INT32_MAX;  // indices are int32
constexpr int64_t kMostParts = 1 << 24;  // clusters, bits, rounds, columns: beyond is a mistake, and much memory
constexpr int64_t kMostThreads = 1 << 10;

[[noreturn]] inline void refuse(const char* name, const std::string& wanted, const std::string& got) {
    throw Malformed(std::string(name) + ": expected " + wanted + ", got " + got);
}

inline std::string text_of(const Shape& shape) {
    std::string text = "(";
    for (size_t axis = 0; axis < shape.size(); axis++) text += (axis ? ", " : "") + std::to_string(shape[axis]);
    return text + ")";
}

inline Shape shape_of(const Tensor& x) {
    Shape shape;
    for (size_t axis = 0; axis < x.ndim(); axis++) shape.push_back(static_cast<int64_t>(x.shape(axis)));
    return shape;
}

inline bool has_dtype(const Tensor& x, nb::dlpack::dtype_code code, int bits) {
    nb::dlpack::dtype type = x.dtype();
    return type.lanes == 1 && type.code == static_cast<uint8_t>(code) && type.bits == bits;
}

inline void check_device(const char* name, const Tensor& x) {
    if (x.device_type() != nb::device::cpu::value) refuse(name, "a tensor on the CPU", "another device");
}

inline void check_shape(const char* name, const Tensor& x, const Shape& want) {
    if (shape_of(x) != want) refuse(name, "shape " + text_of(want), text_of(shape_of(x)));
}

inline void check_rank(const char* name, const Tensor& x, size_t want) {
    if (x.ndim() != want) refuse(name, std::to_string(want) + " dimensions", std::to_string(x.ndim()));
}

inline int64_t check_in(const char* name, int64_t value, int64_t least, int64_t most) {
    if (value < least) refuse(name, "at least " + std::to_string(least), std::to_string(value));
    if (value > most) refuse(name, "at most " + std::to_string(most), std::to_string(value));
    return value;
}

inline int check_threads(int64_t threads) { return static_cast<int>(check_in("threads", threads, 1, kMostThreads)); }

// Key heads must divide heads, as they are shared by equal parts of them.
inline void check_heads(const char* name, int64_t heads, int64_t key_heads) {
    if (!key_heads || heads % key_heads)
        refuse(name, "a multiple of the " + std::to_string(key_heads) + " key heads", std::to_string(heads));
}

// Axes from `first` on must be contiguous. Where there is nothing to step over, strides mean nothing.
inline void check_strides(const char* name, const Tensor& x, size_t first) {
    if (!x.size()) return;
    int64_t step = 1;
    for (size_t axis = x.ndim(); axis-- > first; step *= static_cast<int64_t>(x.shape(axis)))
        if (x.shape(axis) > 1 && x.stride(axis) != step)
            refuse(name, first ? "a contiguous last axis" : "a contiguous tensor", "strides of another layout");
}

template <class T>
constexpr nb::dlpack::dtype_code code_of() {
    if constexpr (std::is_floating_point_v<T>) return nb::dlpack::dtype_code::Float;
    return std::is_signed_v<T> ? nb::dlpack::dtype_code::Int : nb::dlpack::dtype_code::UInt;
}

template <class T>
void check_dtype(const char* name, const Tensor& x) {
    constexpr int bits = 8 * sizeof(T);
    const char* kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
    if (std::is_same_v<T, uint8_t> && has_dtype(x, nb::dlpack::dtype_code::Bool, bits)) return;  // masks
    if (!has_dtype(x, code_of<T>(), bits)) refuse(name, kind + std::to_string(bits), "another dtype");
}

// A contiguous tensor of this shape.
template <class T>
T* data_of(const char* name, const Tensor& x, const Shape& shape) {
    check_device(name, x);
    check_dtype<T>(name, x);
    check_shape(name, x, shape);
    check_strides(name, x, 0);
    return static_cast<T*>(x.data());
}

template <class T>
T* data_of(const char* name, const std::optional<Tensor>& x, const Shape& shape) {
    return x ? data_of<T>(name, *x, shape) : nullptr;
}

// (B, H, N, D) floats with a contiguous last axis.
inline Rows rows_of(const char* name, const Tensor& x) {
    check_device(name, x);
    check_rank(name, x, 4);
    check_strides(name, x, 3);
    check_in(name, static_cast<int64_t>(x.shape(2)), 0, kMostRows);
    Kind kind = Kind::f32;
    if (has_dtype(x, nb::dlpack::dtype_code::Float, 16))
        kind = Kind::f16;
    else if (has_dtype(x, nb::dlpack::dtype_code::Bfloat, 16))
        kind = Kind::bf16;
    else if (!has_dtype(x, nb::dlpack::dtype_code::Float, 32))
        refuse(name, "float32, bfloat16 or float16", "another dtype");
    return {
        .data = x.data(),
        .kind = kind,
        .batch_stride = x.stride(0),
        .head_stride = x.stride(1),
        .row_stride = x.stride(2),
        .batch = static_cast<int64_t>(x.shape(0)),
        .heads = static_cast<int64_t>(x.shape(1)),
        .rows = static_cast<int64_t>(x.shape(2)),
        .dim = static_cast<int64_t>(x.shape(3)),
    };
}

inline Rows rows_of(const char* name, const Tensor& x, const Shape& shape) {
    Rows rows = rows_of(name, x);
    check_shape(name, x, shape);
    return rows;
}

// Which of these rows are real: (B, N) bytes, or nothing.
template <class Mask>
const uint8_t* mask_of(const char* name, const Mask& mask, const Rows& rows) {
    return data_of<uint8_t>(name, mask, {rows.batch, rows.rows});
}

// (B, H, any length) int32 with a contiguous last axis.
inline Index index_of(const char* name, const Tensor& x, int64_t batch, int64_t heads) {
    check_device(name, x);
    check_dtype<int32_t>(name, x);
    check_rank(name, x, 3);
    check_shape(name, x, {batch, heads, static_cast<int64_t>(x.shape(2))});
    check_strides(name, x, 2);
    return {
        .data = static_cast<const int32_t*>(x.data()),
        .batch_stride = x.stride(0),
        .head_stride = x.stride(1),
        .length = static_cast<int64_t>(x.shape(2)),
    };
}

// (B, H, groups, any width) int16 or int32, contiguous.
inline Counts counts_of(const char* name, const Tensor& x, Shape shape) {
    check_device(name, x);
    check_rank(name, x, 4);
    shape.push_back(static_cast<int64_t>(x.shape(3)));
    check_shape(name, x, shape);
    check_strides(name, x, 0);
    bool wide = has_dtype(x, nb::dlpack::dtype_code::Int, 32);
    if (!wide && !has_dtype(x, nb::dlpack::dtype_code::Int, 16)) refuse(name, "int16 or int32", "another dtype");
    return {.data = x.data(), .wide = wide, .width = shape[3]};
}

// Order, start, stop, and positions if there are any; or nothing at all.
inline Segments segments_of(const char* name, const std::vector<Tensor>& parts, int64_t batch, int64_t heads,
                            int threads) {
    Segments segments;
    if (parts.empty()) return segments;
    if (parts.size() != 3 && parts.size() != 4)
        refuse(name, "order, start, stop and perhaps positions", std::to_string(parts.size()) + " tensors");
    auto named = [&](const char* part) { return std::string(name) + "." + part; };
    auto index = [&](const char* part, size_t at) { return index_of(named(part).c_str(), parts[at], batch, heads); };
    segments = {
        .order = index("order", 0),
        .start = index("start", 1),
        .stop = index("stop", 2),
        .batch = batch,
        .heads = heads,
        .threads = threads,
    };
    Shape shape{batch, heads, segments.count()};
    check_shape(named("stop").c_str(), parts[2], shape);
    check_in(named("start").c_str(), segments.count(), 0, kMostRows);
    if (parts.size() == 4) segments.positions = data_of<int32_t>(named("positions").c_str(), parts[3], shape);
    return segments;
}

// What a mask of pairs may look like: 1 or all on every axis. A virtual row has no place of its own in it.
inline PairMask pair_mask_of(const char* name, const Tensor& x, const Call& call) {
    check_device(name, x);
    check_rank(name, x, 4);
    int64_t full[] = {call.batch, call.heads, call.num_queries, call.num_keys};
    bool virtual_rows[] = {false, false, call.query_means.count() > 0, call.key_means.count() > 0};
    auto on_axis = [](int axis) { return " on axis " + std::to_string(axis); };
    PairMask mask;
    for (int axis = 0; axis < 4; axis++) {
        auto size = static_cast<int64_t>(x.shape(axis));
        if (size != 1 && (size != full[axis] || virtual_rows[axis]))
            refuse(name, (virtual_rows[axis] ? "1" : "1 or " + std::to_string(full[axis])) + on_axis(axis),
                   std::to_string(size));
        mask.strides[axis] = size > 1 ? x.stride(axis) : 0;
    }
    mask.is_float = has_dtype(x, nb::dlpack::dtype_code::Float, 32);
    if (!mask.is_float && !has_dtype(x, nb::dlpack::dtype_code::UInt, 8))
        refuse(name, "float32 or uint8", "another dtype");
    mask.data = x.data();
    return mask;
}

}  // namespace coterie
