// Python's view of the kernels: tensors come in and go out through DLPack, and the GIL is free while they work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "checks.h"
#include "kernels.h"
#include "threads.h"

using namespace coterie;

// Signals reach Python's main thread alone, and only when it asks.
static void ask_python() {
    nb::gil_scoped_acquire held;
    if (PyErr_CheckSignals()) throw nb::python_error();
}

static bool is_main_thread() {
    static const nb::handle main_thread = nb::object(nb::module_::import_("threading").attr("main_thread")).release();
    return nb::cast<unsigned long>(main_thread().attr("ident")) == PyThread_get_thread_ident();
}

// While a kernel works the GIL is free, and Ctrl-C is noticed all the same.
class Working {
    Interrupt interrupt_{ask_python};
    WorkingFor call_{is_main_thread() ? &interrupt_ : nullptr};
    nb::gil_scoped_release free_;
};

// What forward and backward share. `layout` holds, for each round: has bias, has skip, has window, low, high.
struct Tensors {
    Tensor q, k, v;
    std::vector<Tensor> rounds, biases, skips;
    std::vector<int64_t> layout;
    Tensor offset;
    std::optional<Tensor> self_keys;
    std::vector<Tensor> query_means, key_means;
    std::optional<Tensor> mask, key_mask, query_mask;
};

struct Settings {
    bool causal, once;
    double scale, dropout_p;
    int64_t seed, threads;
};

static std::vector<Round> rounds_of(const Tensors& t, const Call& call) {
    size_t count = t.layout.size() / 5, bias = 0, skip = 0;
    if (t.layout.size() % 5) refuse("layout", "5 numbers a round", std::to_string(t.layout.size()));
    if (t.rounds.size() != 5 * count)
        refuse("rounds", std::to_string(5 * count) + " tensors", std::to_string(t.rounds.size()));
    for (size_t r = 0; r < count; r++) bias += t.layout[5 * r] != 0, skip += t.layout[5 * r + 1] != 0;
    if (t.biases.size() != bias) refuse("biases", std::to_string(bias) + " tensors", std::to_string(t.biases.size()));
    if (t.skips.size() != skip) refuse("skips", std::to_string(skip) + " tensors", std::to_string(t.skips.size()));
    bias = skip = 0;
    std::vector<Round> rounds(count);
    for (size_t r = 0; r < count; r++) {
        Round& round = rounds[r];
        std::string prefix = "rounds[" + std::to_string(r) + "].";
        auto part = [&](const char* name, size_t at) {
            return index_of((prefix + name).c_str(), t.rounds[5 * r + at], call.batch, call.heads);
        };
        auto same_groups = [&](const char* name, size_t at, int64_t wanted) {
            check_shape((prefix + name).c_str(), t.rounds[5 * r + at], {call.batch, call.heads, wanted});
        };
        round.query_order = part("query_order", 0);
        round.query_offsets = part("query_offsets", 1);
        round.key_order = part("key_order", 2);
        round.key_start = part("key_start", 3);
        round.key_stop = part("key_stop", 4);
        same_groups("query_offsets", 1, round.groups() + 1);
        same_groups("key_stop", 4, round.groups());
        if (t.layout[5 * r])
            round.bias = data_of<float>((prefix + "bias").c_str(), t.biases[bias++],
                                        {call.batch, call.heads, round.key_order.length});
        if (t.layout[5 * r + 1]) {
            const Tensor& lists = t.skips[skip++];
            check_rank((prefix + "skip").c_str(), lists, 4);
            round.skips = static_cast<int64_t>(lists.shape(3));
            round.skip = data_of<int32_t>((prefix + "skip").c_str(), lists,
                                          {call.batch, call.heads, round.query_order.length, round.skips});
        }
        if (t.layout[5 * r + 2]) round.window(t.layout[5 * r + 3], t.layout[5 * r + 4]);
    }
    return rounds;
}

static Call call_of(const Tensors& t, const Settings& settings) {
    Call call;
    call.q = rows_of("q", t.q);
    call.k = rows_of("k", t.k);
    call.v = rows_of("v", t.v);
    call.batch = static_cast<int64_t>(t.q.shape(0));
    call.heads = static_cast<int64_t>(t.q.shape(1));
    call.key_heads = static_cast<int64_t>(t.k.shape(1));
    call.num_queries = call.q.rows;
    call.num_keys = call.k.rows;
    call.threads = check_threads(settings.threads);
    check_shape("k", t.k, {call.batch, call.key_heads, call.num_keys, call.q.dim});
    check_shape("v", t.v, {call.batch, call.key_heads, call.num_keys, call.v.dim});
    check_heads("q", call.heads, call.key_heads);
    call.rounds = rounds_of(t, call);
    call.offset = data_of<int32_t>("offset", t.offset, {call.batch});
    call.self_keys = data_of<int32_t>("self_keys", t.self_keys, {call.batch, call.num_queries});
    call.key_mask = data_of<uint8_t>("key_mask", t.key_mask, {call.batch, call.num_keys});
    call.query_mask = data_of<uint8_t>("query_mask", t.query_mask, {call.batch, call.num_queries});
    call.query_means = segments_of("query_means", t.query_means, call.batch, call.heads, call.threads);
    call.key_means = segments_of("key_means", t.key_means, call.batch, call.key_heads, call.threads);
    bool placed = settings.causal ||
                  std::any_of(call.rounds.begin(), call.rounds.end(), [](const Round& r) { return r.windowed; });
    if (placed && t.query_means.size() == 3) refuse("query_means", "positions in a causal or windowed plan", "none");
    if (placed && t.key_means.size() == 3) refuse("key_means", "positions in a causal or windowed plan", "none");
    if (t.mask) call.mask = pair_mask_of("mask", *t.mask, call);
    if (!std::isfinite(settings.scale)) refuse("scale", "a finite number", std::to_string(settings.scale));
    if (!(settings.dropout_p >= 0 && settings.dropout_p <= 1))
        refuse("dropout_p", "a probability", std::to_string(settings.dropout_p));
    call.causal = settings.causal;
    call.once = settings.once;
    call.scale = static_cast<float>(settings.scale);
    call.dropout_p = settings.dropout_p;
    call.seed = static_cast<uint64_t>(settings.seed);
    return call;
}

// What forward gives and backward takes.
struct Results {
    float *out, *lse;
    uint8_t* alone;
    Shape shape;  // of out
};

static Results results_of(const Call& call, bool self_keys, const Tensor& out, const Tensor& lse,
                          const std::optional<Tensor>& alone) {
    int64_t rows = call.num_queries + call.query_means.count();
    Shape shape{call.batch, call.heads, rows, call.v.dim};
    if (self_keys && !alone) refuse("alone", "a tensor, as there are self_keys", "nothing");
    if (!self_keys && alone) refuse("alone", "nothing, as there are no self_keys", "a tensor");
    return {data_of<float>("out", out, shape), data_of<float>("lse", lse, {call.batch, call.heads, rows}),
            data_of<uint8_t>("alone", alone, {call.batch, call.heads, call.num_queries}), shape};
}

static Gradient gradient_of(const char* name, const Tensor& x, const Tensor& of) {
    return {data_of<float>(name, x, shape_of(of)),
            static_cast<int64_t>(of.shape(2)),
            static_cast<int64_t>(of.shape(3)),
            {},
            0};
}

static void forward(const Tensors& t, const Settings& settings, const Tensor& out, const Tensor& lse,
                    const std::optional<Tensor>& alone) {
    Call call = call_of(t, settings);
    Results results = results_of(call, t.self_keys.has_value(), out, lse, alone);
    Working working;
    run_forward(call, {results.out, results.lse, results.alone});
}

static void backward(const Tensors& t, const Settings& settings, const Tensor& out, const Tensor& lse,
                     const std::optional<Tensor>& alone, const Tensor& grad_out, const Tensor& grad_lse,
                     const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v,
                     const std::optional<Tensor>& grad_mask) {
    Call call = call_of(t, settings);
    Results results = results_of(call, t.self_keys.has_value(), out, lse, alone);
    Backward result{results.out,
                    results.lse,
                    results.alone,
                    rows_of("grad_out", grad_out, results.shape),
                    data_of<float>("grad_lse", grad_lse, shape_of(lse)),
                    gradient_of("grad_q", grad_q, t.q),
                    gradient_of("grad_k", grad_k, t.k),
                    gradient_of("grad_v", grad_v, t.v),
                    nullptr,
                    {}};
    if (grad_mask) {
        if (!t.mask || !call.mask.is_float) refuse("grad_mask", "nothing, as there is no float mask", "a tensor");
        result.grad_mask = data_of<float>("grad_mask", *grad_mask, shape_of(*t.mask));
        for (int axis = 0; axis < 4; axis++)
            result.grad_mask_strides[axis] = grad_mask->shape(axis) > 1 ? grad_mask->stride(axis) : 0;
    }
    Working working;
    run_backward(call, result);
}

// The lists of a tensor whose last axis is what is ordered; `mask` is for every one of its elements.
static OrderShape lists_of(const char* name, const Tensor& x) {
    if (!x.ndim()) refuse(name, "at least 1 dimension", "0");
    int64_t length = check_in(name, static_cast<int64_t>(x.shape(x.ndim() - 1)), 0, kMostRows);
    return {length ? static_cast<int64_t>(x.size()) / length : 0, length};
}

static void order_by(const Tensor& scores, const Tensor& mask, const Tensor& order, int64_t threads) {
    OrderShape lists = lists_of("scores", scores);
    Shape shape = shape_of(scores);
    auto* values = data_of<float>("scores", scores, shape);
    auto* real = data_of<uint8_t>("mask", mask, shape);
    auto* to = data_of<int32_t>("order", order, shape);
    int team = check_threads(threads);
    Working working;
    kernels().planning.order_by(values, real, lists, to, team);
}

static void check_labels(const int64_t* labels, const uint8_t* real, int64_t count, int64_t groups) {
    for (int64_t i = 0; i < count; i++)
        if ((!real || real[i]) && (labels[i] < 0 || labels[i] >= groups))
            refuse("labels", "numbers below " + std::to_string(groups), std::to_string(labels[i]));
}

static void group_by(const Tensor& labels, const Tensor& mask, int64_t groups, const Tensor& order,
                     const Tensor& offsets, int64_t threads) {
    OrderShape lists = lists_of("labels", labels);
    Shape shape = shape_of(labels), bounds = shape;
    bounds.back() = check_in("groups", groups, 0, kMostRows) + 1;
    auto* label = data_of<int64_t>("labels", labels, shape);
    auto* real = data_of<uint8_t>("mask", mask, shape);
    auto* to = data_of<int32_t>("order", order, shape);
    auto* starts = data_of<int32_t>("offsets", offsets, bounds);
    int team = check_threads(threads);
    check_labels(label, real, lists.lists * lists.length, groups);
    if (!lists.length) std::fill_n(starts, offsets.size(), 0);
    Working working;
    kernels().planning.group_by(label, real, lists, groups, to, starts, team);
}

static void smyrf_orders(const Tensor& q, const Tensor& k, const Tensor& query_mask, const Tensor& key_mask,
                         const Tensor& groups, int64_t rounds, int64_t transform, bool buckets, int64_t seed,
                         int64_t layer, int64_t threads, const Tensor& query_order, const Tensor& key_order) {
    HashCall call;
    call.q = rows_of("q", q);
    call.batch = static_cast<int64_t>(q.shape(0));
    call.heads = static_cast<int64_t>(q.shape(1));
    call.k = rows_of("k", k);
    call.key_heads = static_cast<int64_t>(k.shape(1));
    check_shape("k", k, {call.batch, call.key_heads, call.k.rows, call.q.dim});
    check_heads("q", call.heads, call.key_heads);
    call.query_mask = data_of<uint8_t>("query_mask", query_mask, {call.batch, call.q.rows});
    call.key_mask = data_of<uint8_t>("key_mask", key_mask, {call.batch, call.k.rows});
    call.groups = data_of<int64_t>("groups", groups, {call.batch});
    call.rounds = check_in("rounds", rounds, 0, kMostParts);
    call.transform = static_cast<int>(check_in("transform", transform, 0, 4));
    call.buckets = buckets;
    call.seed = static_cast<uint64_t>(seed);
    call.layer = layer;
    call.threads = check_threads(threads);
    auto* queries = data_of<int32_t>("query_order", query_order, {call.batch, call.heads, rounds, call.q.rows});
    auto* keys = data_of<int32_t>("key_order", key_order, {call.batch, call.heads, rounds, call.k.rows});
    Working working;
    kernels().planning.smyrf_orders(call, queries, keys);
}

static void kmeans(const Tensor& x, const Tensor& order, const Tensor& start, const Tensor& stop,
                   const std::optional<Tensor>& counts, const std::optional<Tensor>& given, int64_t clusters,
                   int64_t iterations, int64_t sample, bool unit, bool per_head, int64_t seed, int64_t layer,
                   int64_t threads, const Tensor& labels, const Tensor& centroids) {
    KmeansCall call;
    call.x = rows_of("x", x);
    check_rank("order", order, 2);
    check_rank("start", start, 2);
    call.batch = static_cast<int64_t>(x.shape(0));
    call.heads = static_cast<int64_t>(x.shape(1));
    call.slots = static_cast<int64_t>(order.shape(1));
    call.parts = check_in("start", static_cast<int64_t>(start.shape(1)), 0, kMostRows);
    call.clusters = check_in("clusters", clusters, 1, kMostParts);
    call.iterations = check_in("iterations", iterations, 0, INT32_MAX);
    call.sample = check_in("sample", sample, 0, INT32_MAX);
    Shape centers{call.batch, call.heads, call.parts * clusters, call.x.dim};
    call.order = data_of<int32_t>("order", order, {call.batch, call.slots});
    call.start = data_of<int32_t>("start", start, {call.batch, call.parts});
    call.stop = data_of<int32_t>("stop", stop, {call.batch, call.parts});
    call.counts = data_of<int64_t>("counts", counts, {call.batch, call.parts});
    call.given = data_of<double>("centroids", given, centers);
    call.unit = unit;
    call.per_head = per_head;
    call.seed = static_cast<uint64_t>(seed);
    call.layer = layer;
    call.threads = check_threads(threads);
    auto* label = data_of<int64_t>("labels", labels, {call.batch, call.heads, call.x.rows});
    auto* center = data_of<double>("centroids", centroids, centers);
    Working working;
    check_parts(call);
    kernels().planning.kmeans(call, label, center);
}

static void hamming_kmeans(const Tensor& x, const Tensor& mask, int64_t clusters, int64_t iterations, int64_t bits,
                           int64_t seed, int64_t layer, int64_t threads, const Tensor& labels) {
    Rows rows = rows_of("x", x);
    HammingCall call;
    call.batch = static_cast<int64_t>(x.shape(0));
    call.heads = static_cast<int64_t>(x.shape(1));
    call.rows = rows.rows;
    call.dim = rows.dim;
    call.clusters = check_in("clusters", clusters, 1, kMostParts);
    call.iterations = check_in("iterations", iterations, 0, INT32_MAX);
    call.bits = check_in("bits", bits, 1, kMostParts);
    check_in("clusters * bits", clusters * bits, 1, int64_t{1} << 30);
    call.mask = data_of<uint8_t>("mask", mask, {call.batch, call.rows});
    call.seed = static_cast<uint64_t>(seed);
    call.layer = layer;
    call.threads = check_threads(threads);
    auto* label = data_of<int64_t>("labels", labels, {call.batch, call.heads, call.rows});
    Working working;
    kernels().planning.hamming_kmeans(call, rows, label);
}

static void cluster_means(const Tensor& x, const Tensor& mask, const Tensor& labels, int64_t clusters, int64_t threads,
                          const Tensor& means) {
    MeansCall call;
    call.x = rows_of("x", x);
    call.batch = static_cast<int64_t>(x.shape(0));
    call.heads = static_cast<int64_t>(x.shape(1));
    call.clusters = check_in("clusters", clusters, 0, kMostParts);
    call.mask = data_of<uint8_t>("mask", mask, {call.batch, call.x.rows});
    call.threads = check_threads(threads);
    auto* label = data_of<int64_t>("labels", labels, {call.batch, call.heads, call.x.rows});
    auto* to = data_of<double>("means", means, {call.batch, call.heads, clusters, call.x.dim});
    check_labels(label, nullptr, static_cast<int64_t>(labels.size()), clusters);
    Working working;
    kernels().planning.cluster_means(call, label, to);
}

static void top_keys(const Tensor& queries, const Tensor& k, const Tensor& mask, const std::optional<Tensor>& limits,
                     int64_t count, bool unit, int64_t threads, const Tensor& top) {
    TopCall call;
    call.k = rows_of("k", k);
    check_rank("queries", queries, 4);
    call.batch = static_cast<int64_t>(k.shape(0));
    call.key_heads = static_cast<int64_t>(k.shape(1));
    call.heads = static_cast<int64_t>(queries.shape(1));
    call.queries = static_cast<int64_t>(queries.shape(2));
    call.count = check_in("count", count, 0, kMostRows);
    auto* query = data_of<double>("queries", queries, {call.batch, call.heads, call.queries, call.k.dim});
    check_heads("queries", call.heads, call.key_heads);
    call.mask = data_of<uint8_t>("mask", mask, {call.batch, call.k.rows});
    call.limits = data_of<int64_t>("limits", limits, {call.batch, call.queries});
    call.unit = unit;
    call.threads = check_threads(threads);
    auto* to = data_of<int64_t>("top", top, {call.batch, call.heads, call.queries, count});
    Working working;
    kernels().planning.top_keys(call, query, to);
}

static void near_keys(const Tensor& queries, const Tensor& k, const std::vector<Tensor>& clusters,
                      const Tensor& visible, const Tensor& seen, int64_t near, int64_t reach, int64_t threads,
                      const Tensor& met, const Tensor& bias) {
    NearCall call;
    call.k = rows_of("k", k);
    check_rank("queries", queries, 4);
    check_rank("visible", visible, 3);
    call.batch = static_cast<int64_t>(k.shape(0));
    call.key_heads = static_cast<int64_t>(k.shape(1));
    call.heads = static_cast<int64_t>(queries.shape(1));
    call.groups = static_cast<int64_t>(queries.shape(2));
    call.chunks = static_cast<int64_t>(visible.shape(1));
    call.visible_width = check_in("visible", static_cast<int64_t>(visible.shape(2)), 0, kMostRows);
    call.near = check_in("near", near, 0, kMostRows);
    call.reach = check_in("reach", reach, std::max<int64_t>(1, near), INT64_MAX);
    call.threads = check_threads(threads);
    auto* query = data_of<double>("queries", queries, {call.batch, call.heads, call.groups, call.k.dim});
    check_heads("queries", call.heads, call.key_heads);
    if (clusters.empty()) refuse("clusters", "order, start and stop", "nothing");
    call.clusters = segments_of("clusters", clusters, call.batch, call.key_heads, call.threads);
    call.visible = data_of<int32_t>("visible", visible, {call.batch, call.chunks, call.visible_width});
    call.seen = data_of<int32_t>("seen", seen, {call.batch, call.chunks});
    Shape shape{call.batch, call.heads, call.groups, call.visible_width + near};
    auto* to = data_of<int32_t>("met", met, shape);
    auto* biases = data_of<float>("bias", bias, shape);
    Working working;
    check_near(call);
    kernels().planning.near_keys(call, query, to, biases);
}

static void cross_polytope(const Tensor& x, const Tensor& mask, const Tensor& columns, int64_t heads, int64_t rounds,
                           int64_t seed, int64_t layer, int64_t threads, const Tensor& buckets) {
    PolytopeCall call;
    call.x = rows_of("x", x);
    call.batch = static_cast<int64_t>(x.shape(0));
    call.row_heads = static_cast<int64_t>(x.shape(1));
    call.heads = check_in("heads", heads, 0, kMostRows);
    check_heads("heads", heads, call.row_heads);
    call.rounds = check_in("rounds", rounds, 0, kMostParts);
    call.mask = data_of<uint8_t>("mask", mask, {call.batch, call.x.rows});
    call.columns = data_of<int64_t>("columns", columns, {call.batch});
    for (int64_t b = 0; b < call.batch; b++) check_in("columns", call.columns[b], 0, kMostParts);
    call.seed = static_cast<uint64_t>(seed);
    call.layer = layer;
    call.threads = check_threads(threads);
    auto* to = data_of<int64_t>("buckets", buckets, {call.batch, heads, rounds, call.x.rows});
    Working working;
    kernels().planning.cross_polytope(call, to);
}

NB_MODULE(_native, m) {
    nb::exception<Malformed>(m, "Malformed", PyExc_ValueError);
    nb::class_<Tensors>(m, "Tensors")
        .def(nb::init<Tensor, Tensor, Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>,
                      std::vector<int64_t>, Tensor, std::optional<Tensor>, std::vector<Tensor>, std::vector<Tensor>,
                      std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>>(),
             nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("rounds"), nb::arg("biases"), nb::arg("skips"),
             nb::arg("layout"), nb::arg("offset"), nb::arg("self_keys").none(), nb::arg("query_means"),
             nb::arg("key_means"), nb::arg("mask").none(), nb::arg("key_mask").none(), nb::arg("query_mask").none());
    nb::class_<Settings>(m, "Settings")
        .def(nb::init<bool, bool, double, double, int64_t, int64_t>(), nb::arg("causal"), nb::arg("once"),
             nb::arg("scale"), nb::arg("dropout_p"), nb::arg("seed"), nb::arg("threads"));
    m.def("forward", forward, nb::arg("tensors"), nb::arg("settings"), nb::arg("out"), nb::arg("lse"),
          nb::arg("alone").none());
    m.def("backward", backward, nb::arg("tensors"), nb::arg("settings"), nb::arg("out"), nb::arg("lse"),
          nb::arg("alone").none(), nb::arg("grad_out"), nb::arg("grad_lse"), nb::arg("grad_q"), nb::arg("grad_k"),
          nb::arg("grad_v"), nb::arg("grad_mask").none());
    m.def("adopt_team", [](uintptr_t address) { adopt_team(reinterpret_cast<Team>(address)); });
    m.def("instruction_set", [] { return std::string(kernels().name); });

    m.def("order_by", order_by, nb::arg("scores"), nb::arg("mask"), nb::arg("order"), nb::arg("threads"));
    m.def("group_by", group_by, nb::arg("labels"), nb::arg("mask"), nb::arg("groups"), nb::arg("order"),
          nb::arg("offsets"), nb::arg("threads"));
    m.def("smyrf_orders", smyrf_orders, nb::arg("q"), nb::arg("k"), nb::arg("query_mask"), nb::arg("key_mask"),
          nb::arg("groups"), nb::arg("rounds"), nb::arg("transform"), nb::arg("buckets"), nb::arg("seed"),
          nb::arg("layer"), nb::arg("threads"), nb::arg("query_order"), nb::arg("key_order"));
    m.def("kmeans", kmeans, nb::arg("x"), nb::arg("order"), nb::arg("start"), nb::arg("stop"), nb::arg("counts").none(),
          nb::arg("given").none(), nb::arg("clusters"), nb::arg("iterations"), nb::arg("sample"), nb::arg("unit"),
          nb::arg("per_head"), nb::arg("seed"), nb::arg("layer"), nb::arg("threads"), nb::arg("labels"),
          nb::arg("centroids"));
    m.def("hamming_kmeans", hamming_kmeans, nb::arg("x"), nb::arg("mask"), nb::arg("clusters"), nb::arg("iterations"),
          nb::arg("bits"), nb::arg("seed"), nb::arg("layer"), nb::arg("threads"), nb::arg("labels"));
    m.def("cluster_means", cluster_means, nb::arg("x"), nb::arg("mask"), nb::arg("labels"), nb::arg("clusters"),
          nb::arg("threads"), nb::arg("means"));
    m.def("top_keys", top_keys, nb::arg("queries"), nb::arg("k"), nb::arg("mask"), nb::arg("limits").none(),
          nb::arg("count"), nb::arg("unit"), nb::arg("threads"), nb::arg("top"));
    m.def("near_keys", near_keys, nb::arg("queries"), nb::arg("k"), nb::arg("clusters"), nb::arg("visible"),
          nb::arg("seen"), nb::arg("near"), nb::arg("reach"), nb::arg("threads"), nb::arg("met"), nb::arg("bias"));
    m.def("cross_polytope", cross_polytope, nb::arg("x"), nb::arg("mask"), nb::arg("columns"), nb::arg("heads"),
          nb::arg("rounds"), nb::arg("seed"), nb::arg("layer"), nb::arg("threads"), nb::arg("buckets"));
}
