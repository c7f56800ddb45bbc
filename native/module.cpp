// Python's view of the kernels: tensors come in and go out through DLPack, and the GIL is free while they work.
#include <algorithm>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace nb = nanobind;
using namespace coterie;

using Any = nb::ndarray<nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<double, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<int32_t, nb::device::cpu>;

static Kind kind_of(const Any& x) {
    nb::dlpack::dtype type = x.dtype();
    if (type.lanes == 1 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 32) return Kind::f32;
    if (type.lanes == 1 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16) return Kind::f16;
    if (type.lanes == 1 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16) return Kind::bf16;
    throw Malformed("expected float32, bfloat16 or float16");
}

static Rows rows_of(const Any& x) {
    if (x.ndim() != 4 || (x.shape(3) > 1 && x.stride(3) != 1)) throw Malformed("expected (B, H, N, D) with a contiguous last axis");
    return {x.data(),
            kind_of(x),
            x.stride(0),
            x.stride(1),
            x.stride(2),
            static_cast<int64_t>(x.shape(2)),
            static_cast<int64_t>(x.shape(3))};
}

static Index index_of(const Ints& x) {
    if (x.ndim() != 3 || (x.shape(2) > 1 && x.stride(2) != 1)) throw Malformed("expected (B, H, N) int32 with a contiguous last axis");
    return {x.data(), x.stride(0), x.stride(1), static_cast<int64_t>(x.shape(2))};
}

// What forward and backward share. `layout` holds, for each round: has bias, has skip, has window, low, high.
struct Tensors {
    Any q, k, v;
    std::vector<Ints> rounds;
    std::vector<Floats> biases;
    std::vector<Ints> skips;
    std::vector<int64_t> layout;
    Ints offset;
    std::optional<Ints> self_keys;
    std::vector<Ints> query_means, key_means;  // order, start, stop, and positions if there are any; or nothing
    std::optional<Any> mask;
    std::optional<Bytes> key_mask, query_mask;
};

// Shapes must be what the kernels will index by.
template <class Array>
static void check_shape(const char* name, const Array& x, const std::vector<int64_t>& want) {
    bool fits = x.ndim() == want.size();
    for (size_t axis = 0; fits && axis < want.size(); axis++) fits = int64_t(x.shape(axis)) == want[axis];
    if (fits) return;
    std::string text = std::string(name) + ": expected shape (";
    for (size_t axis = 0; axis < want.size(); axis++) text += (axis ? ", " : "") + std::to_string(want[axis]);
    throw Malformed(text + ")");
}

static void check_rank(const char* name, size_t found, size_t want) {
    if (found != want) throw Malformed(std::string(name) + ": expected " + std::to_string(want) + " dimensions, got " + std::to_string(found));
}

static void check_at_least(const char* name, int64_t found, int64_t least) {
    if (found < least) throw Malformed(std::string(name) + ": expected at least " + std::to_string(least) + ", got " + std::to_string(found));
}

static Segments segments_of(const std::vector<Ints>& parts, int64_t batch, int64_t heads, int threads) {
    Segments segments;
    if (parts.empty()) return segments;
    if (parts.size() < 3) throw Malformed("expected order, start and stop of means");
    for (auto& part : parts)
        if (part.ndim() != 3 || int64_t(part.shape(0)) != batch || int64_t(part.shape(1)) != heads)
            throw Malformed("expected means for this batch and these heads");
    segments.order = index_of(parts.at(0));
    segments.start = index_of(parts.at(1));
    segments.stop = index_of(parts.at(2));
    if (segments.stop.length != segments.start.length) throw Malformed("expected as many starts as stops");
    if (parts.size() > 3) {
        check_shape("positions", parts[3], {batch, heads, segments.start.length});
        segments.positions = parts[3].data();
    }
    segments.batch = batch;
    segments.heads = heads;
    segments.threads = threads;
    return segments;
}

// Key heads must divide heads, as they are shared by equal parts of them.
static void check_heads(const char* name, int64_t heads, int64_t key_heads) {
    if (!key_heads || heads % key_heads) throw Malformed(std::string(name) + ": expected a multiple of the " + std::to_string(key_heads) + " key heads");
}

static Call call_of(const Tensors& t, bool causal, bool once, double scale, double dropout_p, int64_t seed, int threads) {
    Call call;
    call.batch = t.q.shape(0);
    call.heads = t.q.shape(1);
    call.key_heads = t.k.shape(1);
    call.q = rows_of(t.q);
    call.k = rows_of(t.k);
    call.v = rows_of(t.v);
    call.num_queries = call.q.rows;
    call.num_keys = call.k.rows;
    check_shape("k", t.k, {call.batch, call.key_heads, call.num_keys, call.q.dim});
    check_shape("v", t.v, {call.batch, call.key_heads, call.num_keys, call.v.dim});
    check_heads("q", call.heads, call.key_heads);
    check_shape("offset", t.offset, {call.batch});
    if (t.self_keys) check_shape("self_keys", *t.self_keys, {call.batch, call.num_queries});
    if (t.key_mask) check_shape("key_mask", *t.key_mask, {call.batch, call.num_keys});
    if (t.query_mask) check_shape("query_mask", *t.query_mask, {call.batch, call.num_queries});
    size_t bias = 0, skip = 0;
    for (size_t r = 0; 5 * r < t.layout.size(); r++) {
        Round round;
        Index* parts[] = {&round.query_order, &round.query_offsets, &round.key_order, &round.key_start, &round.key_stop};
        for (int p = 0; p < 5; p++) {
            *parts[p] = index_of(t.rounds.at(5 * r + p));
            if (int64_t(t.rounds[5 * r + p].shape(0)) != call.batch || int64_t(t.rounds[5 * r + p].shape(1)) != call.heads)
                throw Malformed("expected a plan for this batch and these heads");
        }
        if (round.query_offsets.length != round.groups() + 1 || round.key_stop.length != round.groups())
            throw Malformed("expected as many offsets as groups");
        if (t.layout[5 * r]) {
            check_shape("bias", t.biases.at(bias), {call.batch, call.heads, round.key_order.length});
            round.bias = t.biases[bias++].data();
        }
        if (t.layout[5 * r + 1]) {
            check_rank("skip", t.skips.at(skip).ndim(), 4);
            round.skips = t.skips[skip].shape(3);
            check_shape("skip", t.skips[skip], {call.batch, call.heads, round.query_order.length, round.skips});
            round.skip = t.skips[skip++].data();
        }
        round.windowed = t.layout[5 * r + 2];
        round.low = t.layout[5 * r + 3];
        round.high = t.layout[5 * r + 4];
        call.rounds.push_back(round);
    }
    call.offset = t.offset.data();
    call.causal = causal;
    call.once = once;
    if (t.self_keys) call.self_keys = t.self_keys->data();
    call.query_means = segments_of(t.query_means, call.batch, call.heads, threads);
    call.key_means = segments_of(t.key_means, call.batch, call.key_heads, threads);
    if (t.mask) {
        check_rank("mask", t.mask->ndim(), 4);
        int64_t full[] = {call.batch, call.heads, call.num_queries, call.num_keys};
        for (int axis = 0; axis < 4; axis++)
            if (int64_t(t.mask->shape(axis)) != 1 && int64_t(t.mask->shape(axis)) != full[axis])
                throw Malformed("mask: expected 1 or " + std::to_string(full[axis]) + " on axis " + std::to_string(axis));
        call.mask.data = t.mask->data();
        call.mask.is_float = t.mask->dtype() == nb::dtype<float>();
        for (int axis = 0; axis < 4; axis++) call.mask.strides[axis] = t.mask->shape(axis) > 1 ? t.mask->stride(axis) : 0;
    }
    if (t.key_mask) call.key_mask = t.key_mask->data();
    if (t.query_mask) call.query_mask = t.query_mask->data();
    call.scale = static_cast<float>(scale);
    call.dropout_p = dropout_p;
    call.seed = static_cast<uint64_t>(seed);
    call.threads = threads;
    return call;
}

static Gradient gradient_of(const Floats& x) { return {x.data(), int64_t(x.shape(2)), int64_t(x.shape(3)), {}, 0}; }

NB_MODULE(_native, m) {
    nb::exception<Malformed>(m, "Malformed", PyExc_ValueError);
    nb::class_<Tensors>(m, "Tensors")
        .def(nb::init<Any, Any, Any, std::vector<Ints>, std::vector<Floats>, std::vector<Ints>, std::vector<int64_t>, Ints,
                      std::optional<Ints>, std::vector<Ints>, std::vector<Ints>, std::optional<Any>, std::optional<Bytes>,
                      std::optional<Bytes>>(),
             nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("rounds"), nb::arg("biases"), nb::arg("skips"),
             nb::arg("layout"), nb::arg("offset"), nb::arg("self_keys").none(), nb::arg("query_means"),
             nb::arg("key_means"), nb::arg("mask").none(), nb::arg("key_mask").none(),
             nb::arg("query_mask").none());
    m.def(
        "forward",
        [](const Tensors& t, bool causal, bool once, double scale,
           double dropout_p, int64_t seed, int threads, Floats out, Floats lse, std::optional<Bytes> alone) {
            Call call = call_of(t, causal, once, scale, dropout_p, seed, threads);
            Forward result{out.data(), lse.data(), alone ? alone->data() : nullptr};
            nb::gil_scoped_release free;
            run_forward(call, result);
        },
        nb::arg("tensors"), nb::arg("causal"), nb::arg("once"),
        nb::arg("scale"), nb::arg("dropout_p"), nb::arg("seed"), nb::arg("threads"), nb::arg("out"), nb::arg("lse"),
        nb::arg("alone").none());
    m.def(
        "backward",
        [](const Tensors& t, bool causal, bool once, double scale,
           double dropout_p, int64_t seed, int threads, Floats out, Floats lse, std::optional<Bytes> alone, Any grad_out,
           Floats grad_lse, Floats grad_q, Floats grad_k, Floats grad_v, std::optional<Floats> grad_mask) {
            Call call = call_of(t, causal, once, scale, dropout_p, seed, threads);
            Backward result{out.data(), lse.data(), alone ? alone->data() : nullptr, rows_of(grad_out), grad_lse.data(),
                            gradient_of(grad_q), gradient_of(grad_k), gradient_of(grad_v), grad_mask ? grad_mask->data() : nullptr, {}};
            if (grad_mask)
                for (int axis = 0; axis < 4; axis++)
                    result.grad_mask_strides[axis] = grad_mask->shape(axis) > 1 ? grad_mask->stride(axis) : 0;
            nb::gil_scoped_release free;
            run_backward(call, result);
        },
        nb::arg("tensors"), nb::arg("causal"), nb::arg("once"),
        nb::arg("scale"), nb::arg("dropout_p"), nb::arg("seed"), nb::arg("threads"), nb::arg("out"), nb::arg("lse"),
        nb::arg("alone").none(), nb::arg("grad_out"), nb::arg("grad_lse"), nb::arg("grad_q"), nb::arg("grad_k"),
        nb::arg("grad_v"), nb::arg("grad_mask").none());
    m.def("adopt_team", [](uintptr_t address) { adopt_team(reinterpret_cast<Team>(address)); });
    m.def("instruction_set", [] { return std::string(kernels().name); });

    m.def("order_by", [](Floats scores, Bytes mask, Ints order, int threads) {
        check_at_least("scores", scores.ndim(), 1);
        std::vector<int64_t> same;
        for (size_t axis = 0; axis < scores.ndim(); axis++) same.push_back(scores.shape(axis));
        check_shape("mask", mask, same);
        OrderShape shape{1, static_cast<int64_t>(scores.shape(scores.ndim() - 1))};
        for (size_t axis = 0; axis + 1 < scores.ndim(); axis++) shape.lists *= scores.shape(axis);
        nb::gil_scoped_release free;
        kernels().planning.order_by(scores.data(), mask.data(), shape, order.data(), threads);
    });
    m.def("group_by", [](Longs labels, Bytes mask, int64_t groups, Ints order, Ints offsets, int threads) {
        check_at_least("labels", labels.ndim(), 1);
        std::vector<int64_t> same;
        for (size_t axis = 0; axis < labels.ndim(); axis++) same.push_back(labels.shape(axis));
        check_shape("mask", mask, same);
        check_at_least("groups", groups, 0);
        OrderShape shape{1, same.back()};
        for (size_t axis = 0; axis + 1 < same.size(); axis++) shape.lists *= same[axis];
        for (int64_t i = 0; i < shape.lists * shape.length; i++)
            if (mask.data()[i] && (labels.data()[i] < 0 || labels.data()[i] >= groups))
                throw Malformed("labels: expected numbers below " + std::to_string(groups));
        nb::gil_scoped_release free;
        kernels().planning.group_by(labels.data(), mask.data(), shape, groups, order.data(), offsets.data(), threads);
    });
    m.def("smyrf_orders", [](Any q, Any k, Bytes query_mask, Bytes key_mask, Longs groups, int64_t rounds, int transform,
                             bool buckets, int64_t seed, int64_t layer, int threads, Ints query_order, Ints key_order) {
        Rows queries = rows_of(q), keys = rows_of(k);
        int64_t batch = q.shape(0), heads = q.shape(1), key_heads = k.shape(1);
        check_shape("k", k, {batch, key_heads, keys.rows, queries.dim});
        check_heads("q", heads, key_heads);
        check_shape("query_mask", query_mask, {batch, queries.rows});
        check_shape("key_mask", key_mask, {batch, keys.rows});
        check_shape("groups", groups, {batch});
        check_at_least("rounds", rounds, 0);
        HashCall call{int64_t(q.shape(0)), int64_t(q.shape(1)), int64_t(k.shape(1)), rounds, rows_of(q), rows_of(k),
                      query_mask.data(), key_mask.data(), transform, buckets, groups.data(), uint64_t(seed), layer, threads};
        nb::gil_scoped_release free;
        kernels().planning.smyrf_orders(call, query_order.data(), key_order.data());
    });
    m.def("kmeans", [](Any x, Ints order, Ints start, Ints stop, std::optional<Longs> counts, std::optional<Doubles> given,
                       int64_t clusters, int64_t iterations, int64_t sample, bool unit, bool per_head, int64_t seed, int64_t layer, int threads,
                       Longs labels, Doubles centroids) {
        Rows rows = rows_of(x);
        check_rank("order", order.ndim(), 2);
        check_rank("start", start.ndim(), 2);
        int64_t batch = x.shape(0), heads = x.shape(1), parts = start.shape(1);
        check_shape("order", order, {batch, int64_t(order.shape(1))});
        check_shape("start", start, {batch, parts});
        check_shape("stop", stop, {batch, parts});
        if (counts) check_shape("counts", *counts, {batch, parts});
        if (given) check_shape("centroids", *given, {batch, heads, parts * clusters, rows.dim});
        check_at_least("clusters", clusters, 1);
        check_at_least("iterations", iterations, 0);
        check_at_least("sample", sample, 0);
        KmeansCall call{int64_t(x.shape(0)), int64_t(x.shape(1)), int64_t(start.shape(1)), int64_t(order.shape(1)), rows_of(x),
                        order.data(), start.data(), stop.data(), counts ? counts->data() : nullptr,
                        given ? given->data() : nullptr, clusters, iterations, sample, unit, per_head, uint64_t(seed), layer, threads};
        nb::gil_scoped_release free;
        check_parts(call);
        kernels().planning.kmeans(call, labels.data(), centroids.data());
    }, nb::arg("x"), nb::arg("order"), nb::arg("start"), nb::arg("stop"), nb::arg("counts").none(), nb::arg("given").none(),
       nb::arg("clusters"), nb::arg("iterations"), nb::arg("sample"), nb::arg("unit"), nb::arg("per_head"), nb::arg("seed"), nb::arg("layer"),
       nb::arg("threads"), nb::arg("labels"), nb::arg("centroids"));
    m.def("hamming_kmeans", [](Any x, Bytes mask, int64_t clusters, int64_t iterations, int64_t bits, int64_t seed,
                               int64_t layer, int threads, Longs labels) {
        Rows rows = rows_of(x);
        check_shape("mask", mask, {int64_t(x.shape(0)), rows.rows});
        check_at_least("clusters", clusters, 1);
        check_at_least("iterations", iterations, 0);
        check_at_least("bits", bits, 1);
        HammingCall call{int64_t(x.shape(0)), int64_t(x.shape(1)), int64_t(x.shape(2)), int64_t(x.shape(3)), clusters,
                         iterations, bits, mask.data(), uint64_t(seed), layer, threads};
        nb::gil_scoped_release free;
        kernels().planning.hamming_kmeans(call, rows, labels.data());
    });
    m.def("cluster_means", [](Any x, Bytes mask, Longs labels, int64_t clusters, int threads, Doubles means) {
        Rows rows = rows_of(x);
        check_shape("mask", mask, {int64_t(x.shape(0)), rows.rows});
        check_shape("labels", labels, {int64_t(x.shape(0)), int64_t(x.shape(1)), rows.rows});
        const int64_t *label = labels.data(), *end = label + labels.size();
        if (std::any_of(label, end, [&](int64_t c) { return c < 0 || c >= clusters; }))
            throw Malformed("labels: expected numbers below " + std::to_string(clusters));
        MeansCall call{int64_t(x.shape(0)), int64_t(x.shape(1)), clusters, rows_of(x), mask.data(), threads};
        nb::gil_scoped_release free;
        kernels().planning.cluster_means(call, labels.data(), means.data());
    });
    m.def("top_keys", [](Doubles queries, Any k, Bytes mask, std::optional<Longs> limits, int64_t count, bool unit, int threads,
                         Longs top) {
        Rows rows = rows_of(k);
        check_rank("queries", queries.ndim(), 4);
        int64_t batch = k.shape(0), heads = queries.shape(1), key_heads = k.shape(1), many = queries.shape(2);
        check_shape("queries", queries, {batch, heads, many, rows.dim});
        check_heads("queries", heads, key_heads);
        check_shape("mask", mask, {batch, rows.rows});
        if (limits) check_shape("limits", *limits, {batch, many});
        check_at_least("count", count, 0);
        TopCall call{int64_t(queries.shape(0)), int64_t(queries.shape(1)), int64_t(k.shape(1)), int64_t(queries.shape(2)),
                     count, rows_of(k), mask.data(), limits ? limits->data() : nullptr, unit, threads};
        nb::gil_scoped_release free;
        kernels().planning.top_keys(call, queries.data(), top.data());
    }, nb::arg("queries"), nb::arg("k"), nb::arg("mask"), nb::arg("limits").none(), nb::arg("count"), nb::arg("unit"),
       nb::arg("threads"), nb::arg("top"));
    m.def("near_keys", [](Doubles queries, Any k, std::vector<Ints> clusters, Ints visible, Ints seen, int64_t near, int64_t reach,
                          int threads, Ints met, Floats bias) {
        Rows rows = rows_of(k);
        check_rank("queries", queries.ndim(), 4);
        check_rank("visible", visible.ndim(), 3);
        int64_t batch = k.shape(0), key_heads = k.shape(1), heads = queries.shape(1);
        check_shape("queries", queries, {batch, heads, int64_t(queries.shape(2)), rows.dim});
        check_shape("visible", visible, {batch, int64_t(visible.shape(1)), int64_t(visible.shape(2))});
        check_shape("seen", seen, {batch, int64_t(visible.shape(1))});
        check_heads("queries", heads, key_heads);
        check_at_least("near", near, 0);
        check_at_least("reach", reach, std::max<int64_t>(1, near));
        NearCall call{int64_t(queries.shape(0)), int64_t(queries.shape(1)), int64_t(k.shape(1)), int64_t(queries.shape(2)),
                      int64_t(visible.shape(1)), int64_t(visible.shape(2)), near, reach, rows_of(k),
                      segments_of(clusters, int64_t(k.shape(0)), int64_t(k.shape(1)), threads), visible.data(), seen.data(), threads};
        nb::gil_scoped_release free;
        check_near(call);
        kernels().planning.near_keys(call, queries.data(), met.data(), bias.data());
    });
    m.def("cross_polytope", [](Any x, Bytes mask, Longs columns, int64_t heads, int64_t rounds, int64_t seed, int64_t layer,
                               int threads, Longs buckets) {
        Rows rows = rows_of(x);
        int64_t batch = x.shape(0);
        check_shape("mask", mask, {batch, rows.rows});
        check_shape("columns", columns, {batch});
        check_heads("heads", heads, x.shape(1));
        check_at_least("rounds", rounds, 0);
        PolytopeCall call{int64_t(x.shape(0)), heads, int64_t(x.shape(1)), rounds, rows_of(x), mask.data(), columns.data(),
                          uint64_t(seed), layer, threads};
        nb::gil_scoped_release free;
        kernels().planning.cross_polytope(call, buckets.data());
    });
}
