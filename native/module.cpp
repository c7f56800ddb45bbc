// Python's view of the kernels: tensors come in and go out through DLPack, and the GIL is free while they work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "checks.h"
#include "clustered.h"
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

// A call of several parts that are shared out, as one region. `numbers`: that it multiplies, or fewer.
template <class Body>
static void working(double numbers, int threads, Body&& body) {
    Working now;
    in_one_region(threads_for(numbers, threads), body);
}

// What forward and backward share. `layout` holds, for each round: has bias, has skip, has counts, has window, low,
// high.
struct Tensors {
    Tensor q, k, v;
    std::vector<Tensor> rounds, biases, skips, counts;
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

static int64_t size_of(const Tensor& x, size_t axis) { return static_cast<int64_t>(x.shape(axis)); }

static void check_count(const char* name, const std::vector<Tensor>& tensors, size_t wanted) {
    if (tensors.size() != wanted) refuse(name, std::to_string(wanted) + " tensors", std::to_string(tensors.size()));
}

static Round round_of(const std::string& prefix, const Tensor* parts, int64_t batch, int64_t heads) {
    auto part = [&](const char* name, size_t at) { return index_of((prefix + name).c_str(), parts[at], batch, heads); };
    Round round{
        .query_order = part("query_order", 0),
        .query_offsets = part("query_offsets", 1),
        .key_order = part("key_order", 2),
        .key_start = part("key_start", 3),
        .key_stop = part("key_stop", 4),
    };
    check_shape((prefix + "query_offsets").c_str(), parts[1], {batch, heads, round.groups() + 1});
    check_shape((prefix + "key_stop").c_str(), parts[4], {batch, heads, round.groups()});
    return round;
}

static std::vector<Round> rounds_of(const Tensors& t, int64_t batch, int64_t heads) {
    size_t count = t.layout.size() / 6, bias = 0, skip = 0, counted = 0;
    if (t.layout.size() % 6) refuse("layout", "6 numbers a round", std::to_string(t.layout.size()));
    for (size_t r = 0; r < count; r++) {
        bias += t.layout[6 * r] != 0;
        skip += t.layout[6 * r + 1] != 0;
        counted += t.layout[6 * r + 2] != 0;
    }
    check_count("rounds", t.rounds, 5 * count);
    check_count("biases", t.biases, bias);
    check_count("skips", t.skips, skip);
    check_count("counts", t.counts, counted);
    bias = skip = counted = 0;
    std::vector<Round> rounds;
    for (size_t r = 0; r < count; r++) {
        const int64_t* layout = t.layout.data() + 6 * r;
        std::string prefix = "rounds[" + std::to_string(r) + "].";
        Round round = round_of(prefix, t.rounds.data() + 5 * r, batch, heads);
        if (layout[0])
            round.bias =
                data_of<float>((prefix + "bias").c_str(), t.biases[bias++], {batch, heads, round.key_order.length});
        if (layout[1]) {
            const Tensor& lists = t.skips[skip++];
            check_rank((prefix + "skip").c_str(), lists, 4);
            round.skips = size_of(lists, 3);
            round.skip = data_of<int32_t>((prefix + "skip").c_str(), lists,
                                          {batch, heads, round.query_order.length, round.skips});
        }
        if (layout[2])
            round.counts = counts_of((prefix + "counts").c_str(), t.counts[counted++], {batch, heads, round.groups()});
        if (layout[3]) round.window(layout[4], layout[5]);
        rounds.push_back(round);
    }
    return rounds;
}

static Call call_of(const Tensors& t, const Settings& settings) {
    Rows q = rows_of("q", t.q), k = rows_of("k", t.k), v = rows_of("v", t.v);
    int threads = check_threads(settings.threads);
    check_shape("k", t.k, {q.batch, k.heads, k.rows, q.dim});
    check_shape("v", t.v, {q.batch, k.heads, k.rows, v.dim});
    check_heads("q", q.heads, k.heads);
    Call call{
        .batch = q.batch,
        .heads = q.heads,
        .key_heads = k.heads,
        .num_queries = q.rows,
        .num_keys = k.rows,
        .threads = threads,
        .q = q,
        .k = k,
        .v = v,
        .rounds = rounds_of(t, q.batch, q.heads),
        .offset = data_of<int32_t>("offset", t.offset, {q.batch}),
        .self_keys = data_of<int32_t>("self_keys", t.self_keys, {q.batch, q.rows}),
        .key_mask = mask_of("key_mask", t.key_mask, k),
        .query_mask = mask_of("query_mask", t.query_mask, q),
        .query_means = segments_of("query_means", t.query_means, q.batch, q.heads, threads),
        .key_means = segments_of("key_means", t.key_means, q.batch, k.heads, threads),
        .causal = settings.causal,
        .once = settings.once,
        .scale = static_cast<float>(settings.scale),
        .dropout_p = settings.dropout_p,
        .seed = static_cast<uint64_t>(settings.seed),
    };
    auto windowed = [](const Round& round) { return round.windowed; };
    bool placed = call.causal || std::any_of(call.rounds.begin(), call.rounds.end(), windowed);
    if (placed && t.query_means.size() == 3) refuse("query_means", "positions in a causal or windowed plan", "none");
    if (placed && t.key_means.size() == 3) refuse("key_means", "positions in a causal or windowed plan", "none");
    if (t.mask) call.mask = pair_mask_of("mask", *t.mask, call);
    if (!std::isfinite(settings.scale)) refuse("scale", "a finite number", std::to_string(settings.scale));
    if (!(settings.dropout_p >= 0 && settings.dropout_p <= 1))
        refuse("dropout_p", "a probability", std::to_string(settings.dropout_p));
    return call;
}

// What forward gives and backward takes.
static Forward results_of(const Call& call, const Tensors& t, const Tensor& out, const Tensor& lse,
                          const std::optional<Tensor>& alone) {
    int64_t rows = call.num_queries + call.query_means.count();
    if (t.self_keys && !alone) refuse("alone", "a tensor, as there are self_keys", "nothing");
    if (!t.self_keys && alone) refuse("alone", "nothing, as there are no self_keys", "a tensor");
    return {
        .out = data_of<float>("out", out, {call.batch, call.heads, rows, call.v.dim}),
        .lse = data_of<float>("lse", lse, {call.batch, call.heads, rows}),
        .alone = data_of<uint8_t>("alone", alone, {call.batch, call.heads, call.num_queries}),
    };
}

static Gradient gradient_of(const char* name, const Tensor& x, const Tensor& of) {
    return {.own = data_of<float>(name, x, shape_of(of)), .own_rows = size_of(of, 2), .dim = size_of(of, 3)};
}

static void forward(const Tensors& t, const Settings& settings, const Tensor& out, const Tensor& lse,
                    const std::optional<Tensor>& alone) {
    Call call = call_of(t, settings);
    Forward result = results_of(call, t, out, lse, alone);
    Working working;
    run_forward(call, result);
}

static void backward(const Tensors& t, const Settings& settings, const Tensor& out, const Tensor& lse,
                     const std::optional<Tensor>& alone, const Tensor& grad_out, const Tensor& grad_lse,
                     const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v,
                     const std::optional<Tensor>& grad_mask) {
    Call call = call_of(t, settings);
    Backward result{
        .forward = results_of(call, t, out, lse, alone),
        .grad_out = rows_of("grad_out", grad_out, shape_of(out)),
        .grad_lse = data_of<float>("grad_lse", grad_lse, shape_of(lse)),
        .q = gradient_of("grad_q", grad_q, t.q),
        .k = gradient_of("grad_k", grad_k, t.k),
        .v = gradient_of("grad_v", grad_v, t.v),
    };
    if (grad_mask) {
        if (!t.mask || !call.mask.is_float) refuse("grad_mask", "nothing, as there is no float mask", "a tensor");
        result.grad_mask = data_of<float>("grad_mask", *grad_mask, shape_of(*t.mask));
        for (int axis = 0; axis < 4; axis++)
            result.grad_mask_strides[axis] = grad_mask->shape(axis) > 1 ? grad_mask->stride(axis) : 0;
    }
    Working working;
    run_backward(call, result);
}

static Draws draws_of(int64_t seed, int64_t layer) { return {.seed = static_cast<uint64_t>(seed), .layer = layer}; }

// The lists of a tensor whose last axis is what is ordered; `mask` is for every one of its elements.
static OrderShape lists_of(const char* name, const Tensor& x) {
    if (!x.ndim()) refuse(name, "at least 1 dimension", "0");
    int64_t length = check_in(name, size_of(x, x.ndim() - 1), 0, kMostRows);
    return {.lists = length ? static_cast<int64_t>(x.size()) / length : 0, .length = length};
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
                         const Tensor& groups, int64_t rounds, int64_t transform, bool e2lsh, int64_t seed,
                         int64_t layer, int64_t threads, const Tensor& query_order, const Tensor& key_order) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    check_shape("k", k, {queries.batch, keys.heads, keys.rows, queries.dim});
    check_heads("q", queries.heads, keys.heads);
    HashCall call{
        .q = queries,
        .k = keys,
        .query_mask = mask_of("query_mask", query_mask, queries),
        .key_mask = mask_of("key_mask", key_mask, keys),
        .groups = data_of<int64_t>("groups", groups, {queries.batch}),
        .rounds = check_in("rounds", rounds, 0, kMostParts),
        .transform = static_cast<int>(check_in("transform", transform, 0, 4)),
        .buckets = e2lsh,
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    auto* of_queries =
        data_of<int32_t>("query_order", query_order, {queries.batch, queries.heads, rounds, queries.rows});
    auto* of_keys = data_of<int32_t>("key_order", key_order, {queries.batch, queries.heads, rounds, keys.rows});
    Working working;
    kernels().planning.smyrf_orders(call, of_queries, of_keys);
}

static void cut(const uint8_t* queries, const uint8_t* keys, const Rows& q, const Rows& k, int64_t cluster_size,
                int64_t groups, std::vector<int64_t>& used, int32_t* query_offsets, int32_t* key_offsets) {
    for (int64_t b = 0; b < q.batch; b++) {
        int64_t rows = Real(queries + b * q.rows, q.rows).count(), columns = Real(keys + b * k.rows, k.rows).count();
        // Never more groups than keys, or some queries would meet nobody.
        used[b] = std::max<int64_t>(1, std::min((rows + cluster_size - 1) / cluster_size, columns));
        for (int64_t h = 0; h < q.heads; h++)
            for (int64_t g = 0, at = (b * q.heads + h) * (groups + 1); g <= groups; g++, at++) {
                query_offsets[at] = static_cast<int32_t>(balanced(g, rows, used[b]));
                key_offsets[at] = static_cast<int32_t>(balanced(g, columns, used[b]));
            }
    }
}

static void smyrf_groups(const Tensor& q, const Tensor& k, const Tensor& query_mask, const Tensor& key_mask,
                         int64_t cluster_size, int64_t rounds, int64_t transform, bool e2lsh, int64_t seed,
                         int64_t layer, int64_t threads, const Tensor& query_order, const Tensor& key_order,
                         const Tensor& query_offsets, const Tensor& key_offsets) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    check_shape("k", k, {queries.batch, keys.heads, keys.rows, queries.dim});
    check_heads("q", queries.heads, keys.heads);
    check_in("cluster_size", cluster_size, 1, kMostRows);
    check_rank("query_offsets", query_offsets, 3);
    int64_t groups = check_in("query_offsets", size_of(query_offsets, 2) - 1, 0, kMostRows);
    std::vector<int64_t> used(queries.batch);
    HashCall call{
        .q = queries,
        .k = keys,
        .query_mask = mask_of("query_mask", query_mask, queries),
        .key_mask = mask_of("key_mask", key_mask, keys),
        .groups = used.data(),
        .rounds = check_in("rounds", rounds, 0, kMostParts),
        .transform = static_cast<int>(check_in("transform", transform, 0, 4)),
        .buckets = e2lsh,
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    Shape lead{queries.batch, queries.heads};
    auto* of_queries = data_of<int32_t>("query_order", query_order, {lead[0], lead[1], rounds, queries.rows});
    auto* of_keys = data_of<int32_t>("key_order", key_order, {lead[0], lead[1], rounds, keys.rows});
    auto* query_edges = data_of<int32_t>("query_offsets", query_offsets, {lead[0], lead[1], groups + 1});
    auto* key_edges = data_of<int32_t>("key_offsets", key_offsets, {lead[0], lead[1], groups + 1});
    Working working;
    cut(call.query_mask, call.key_mask, queries, keys, cluster_size, groups, used, query_edges, key_edges);
    kernels().planning.smyrf_orders(call, of_queries, of_keys);
}

// Masks of tokens: (batch, queries) and (batch, keys).
struct TokenMasks {
    int64_t batch, queries, keys;
    const uint8_t *query, *key;

    TokenMasks(const Tensor& query_mask, const Tensor& key_mask) {
        check_rank("query_mask", query_mask, 2);
        check_rank("key_mask", key_mask, 2);
        batch = size_of(query_mask, 0);
        queries = check_in("query_mask", size_of(query_mask, 1), 0, kMostRows);
        keys = check_in("key_mask", size_of(key_mask, 1), 0, kMostRows);
        query = data_of<uint8_t>("query_mask", query_mask, {batch, queries});
        key = data_of<uint8_t>("key_mask", key_mask, {batch, keys});
    }
};

// Blocks of neighbouring queries, and the keys from `back` before the first of a block to `ahead` behind its last.
static void neighbours(const Tensor& query_mask, const Tensor& key_mask, const Tensor& offset, int64_t block,
                       int64_t back, int64_t ahead, const Tensor& query_order, const Tensor& query_offsets,
                       const Tensor& key_order, const Tensor& key_start, const Tensor& key_stop) {
    TokenMasks masks(query_mask, key_mask);
    check_in("block", block, 1, kMostRows);
    for (int64_t reach : {back, ahead}) check_in("back and ahead", reach, -(int64_t{1} << 32), int64_t{1} << 32);
    check_rank("key_start", key_start, 2);
    int64_t batch = masks.batch, blocks = check_in("key_start", size_of(key_start, 1), 0, kMostRows);
    auto* at = data_of<int32_t>("offset", offset, {batch});
    auto* rows = data_of<int32_t>("query_order", query_order, {batch, masks.queries});
    auto* edges = data_of<int32_t>("query_offsets", query_offsets, {batch, blocks + 1});
    auto* columns = data_of<int32_t>("key_order", key_order, {batch, masks.keys});
    auto* start = data_of<int32_t>("key_start", key_start, {batch, blocks});
    auto* stop = data_of<int32_t>("key_stop", key_stop, {batch, blocks});
    Working working;
    for (int64_t b = 0; b < batch; b++) {
        Real queries(masks.query + b * masks.queries, masks.queries), keys(masks.key + b * masks.keys, masks.keys);
        queries.list(rows + b * masks.queries);
        keys.list(columns + b * masks.keys);
        auto before = [&](int64_t position) { return keys.before[std::clamp<int64_t>(position, 0, masks.keys)]; };
        for (int64_t g = 0; g <= blocks; g++) {
            int64_t first = std::min(g * block, masks.queries), last = std::min((g + 1) * block, masks.queries) - 1;
            edges[b * (blocks + 1) + g] = queries.before[first];
            if (g == blocks) break;
            start[b * blocks + g] = before(first + at[b] - back);
            stop[b * blocks + g] = before(last + at[b] + ahead + 1);
        }
    }
}

// The key that each query is level with, if both are real; otherwise −1.
static void self_keys(const Tensor& query_mask, const Tensor& key_mask, const Tensor& offset, const Tensor& selves) {
    TokenMasks masks(query_mask, key_mask);
    auto* at = data_of<int32_t>("offset", offset, {masks.batch});
    auto* to = data_of<int32_t>("selves", selves, {masks.batch, masks.queries});
    for (int64_t b = 0; b < masks.batch; b++)
        for (int64_t i = 0; i < masks.queries; i++) {
            int64_t key = i + at[b];
            bool real = key >= 0 && key < masks.keys && masks.query[b * masks.queries + i];
            to[b * masks.queries + i] = real && masks.key[b * masks.keys + key] ? static_cast<int32_t>(key) : -1;
        }
}

static void clustered(const Tensor& q, const Tensor& k, const Tensor& query_mask, const Tensor& key_mask,
                      int64_t clusters, int64_t iterations, int64_t bits, int64_t top, double scale, int64_t seed,
                      int64_t layer, int64_t threads, const std::vector<Tensor>& far, const std::vector<Tensor>& near) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    check_shape("k", k, {queries.batch, keys.heads, keys.rows, queries.dim});
    check_heads("q", queries.heads, keys.heads);
    ClusteredCall call{
        .q = queries,
        .k = keys,
        .query_mask = mask_of("query_mask", query_mask, queries),
        .key_mask = mask_of("key_mask", key_mask, keys),
        .clusters = check_in("clusters", clusters, 1, kMostParts),
        .iterations = check_in("iterations", iterations, 0, INT32_MAX),
        .bits = check_in("bits", bits, 0, kMostParts),
        .top = check_in("top", top, 0, keys.rows),
        .scale = scale,
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    check_in("clusters * bits", clusters * bits, 0, int64_t{1} << 30);
    check_in("clusters", queries.rows + 2 * clusters, 0, kMostRows);
    check_in("top", clusters * top, 0, kMostRows);
    check_count("far", far, 9);
    check_count("near", near, top ? 7 : 0);
    int64_t batch = queries.batch, heads = queries.heads, rows = queries.rows, copies = top ? 2 : 1;
    auto ints = [&](const std::vector<Tensor>& lists, const char* name, size_t at, const Shape& shape) {
        return at < lists.size() ? data_of<int32_t>(name, lists[at], shape) : nullptr;
    };
    ClusteredPlan plan{
        .far_order = ints(far, "far", 0, {batch, heads, clusters}),
        .far_offsets = ints(far, "far", 1, {batch, heads, 2}),
        .keys = ints(far, "far", 2, {batch, keys.rows}),
        .key_start = ints(far, "far", 3, {batch, 1}),
        .key_stop = ints(far, "far", 4, {batch, 1}),
        .members = ints(far, "far", 5, {batch, heads, rows}),
        .start = ints(far, "far", 6, {batch, heads, clusters * copies}),
        .stop = ints(far, "far", 7, {batch, heads, clusters * copies}),
        .answer = ints(far, "far", 8, {batch, heads, rows}),
        .mass = ints(near, "near", 0, {batch, heads, rows}),
        .skip = ints(near, "near", 1, {batch, heads, clusters, top}),
        .near_order = ints(near, "near", 2, {batch, heads, rows + clusters}),
        .near_offsets = ints(near, "near", 3, {batch, heads, clusters + 1}),
        .near_keys = ints(near, "near", 4, {batch, heads, clusters * top}),
        .near_start = ints(near, "near", 5, {batch, heads, clusters}),
        .near_stop = ints(near, "near", 6, {batch, heads, clusters}),
    };
    working(8 * (call.q.numbers() + call.k.numbers()), call.threads, [&] { Clustered(call, plan).run(); });
}

static void check_rows(const char* name, const int32_t* rows, size_t count, int64_t most) {
    for (size_t i = 0; rows && i < count; i++) check_in(name, rows[i], -1, most - 1);
}

static void borrow_answers(const Tensor& out, const Tensor& lse, const Tensor& answer,
                           const std::optional<Tensor>& mass, int64_t threads, const Tensor& merged,
                           const Tensor& masses) {
    check_rank("out", out, 4);
    check_rank("answer", answer, 3);
    int64_t batch = size_of(out, 0), heads = size_of(out, 1), rows = size_of(out, 2), dim = size_of(out, 3);
    int64_t queries = check_in("answer", size_of(answer, 2), 0, rows);
    Shape shape{batch, heads, queries};
    BorrowCall call{
        .heads = batch * heads,
        .queries = queries,
        .rows = rows,
        .dim = dim,
        .out = data_of<float>("out", out, {batch, heads, rows, dim}),
        .lse = data_of<float>("lse", lse, {batch, heads, rows}),
        .answer = data_of<int32_t>("answer", answer, shape),
        .mass = data_of<int32_t>("mass", mass, shape),
        .threads = check_threads(threads),
    };
    auto* to = data_of<float>("merged", merged, {batch, heads, queries, dim});
    auto* masses_to = data_of<float>("masses", masses, shape);
    check_rows("answer", call.answer, answer.size(), rows);
    check_rows("mass", call.mass, answer.size(), rows);
    Working working;
    borrow(call, to, masses_to);
}

// share, clusters, tokens, room.
static Count count_of(const char* name, const int64_t* numbers) {
    return {
        .share = check_in(name, numbers[0], 0, kMostRows),
        .clusters = check_in(name, numbers[1], 0, kMostRows),
        .tokens = check_in(name, numbers[2], 0, kMostRows),
        .room = check_in(name, numbers[3], 1, kMostRows),
    };
}

static void check_product(const char* name, double product) {
    if (!(product < 4e18)) refuse(name, "numbers whose product fits into 64 bits", "larger ones");
}

static std::vector<NearFarLevel> levels_of(const std::vector<int64_t>& numbers, int64_t chunk, int64_t keys) {
    if (numbers.empty() || numbers.size() % 6) refuse("levels", "6 numbers each", std::to_string(numbers.size()));
    std::vector<NearFarLevel> levels;
    for (size_t at = 0; at < numbers.size(); at += 6) {
        levels.push_back({
            .size = check_in("levels", numbers[at], 1, kMostRows),
            .blocks = check_in("levels", numbers[at + 1], 1, kMostRows),
            .clusters = count_of("levels", numbers.data() + at + 2),
        });
        check_in("levels", levels.back().clusters.room, 1, kMostParts);
        check_product("levels", double(levels.back().size) * (double(levels.back().blocks) + 1) * (double(chunk) + 1));
        int64_t hold = levels.back().blocks * levels.back().size * chunk;
        if (chunk && hold < keys)
            refuse("levels", "blocks for " + std::to_string(keys) + " keys", std::to_string(hold));
    }
    if (!chunk && (levels.size() > 1 || levels[0].blocks > 1)) refuse("levels", "one block without chunks", "more");
    return levels;
}

static void near_far(const Tensor& q, const Tensor& k, const Tensor& query_mask, const Tensor& key_mask,
                     const Tensor& offset, int64_t chunk, const std::vector<int64_t>& groups, int64_t parts,
                     int64_t room, int64_t in_part, const std::vector<int64_t>& levels, int64_t iterations,
                     int64_t key_iterations, int64_t sample, int64_t looked_at, int64_t party, int64_t near,
                     int64_t reach, bool wide, int64_t sinks, double scale, int64_t seed, int64_t layer,
                     int64_t threads, const Tensor& order, const Tensor& offsets, const Tensor& bounds,
                     const Tensor& rows, const Tensor& picks, const Tensor& left, const std::vector<Tensor>& clusters,
                     const std::vector<Tensor>& chunks) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    check_shape("k", k, {queries.batch, keys.heads, keys.rows, queries.dim});
    check_heads("q", queries.heads, keys.heads);
    check_in("head size", keys.dim, 0, int64_t{1} << 16);  // sums of products of bytes fit into 32 bits
    check_in("near", near, 0, kMostRows);
    if (groups.size() != 4) refuse("groups", "4 numbers", std::to_string(groups.size()));
    NearFarCall call{
        .q = queries,
        .k = keys,
        .query_mask = mask_of("query_mask", query_mask, queries),
        .key_mask = mask_of("key_mask", key_mask, keys),
        .offset = data_of<int32_t>("offset", offset, {queries.batch}),
        .chunk = check_in("chunk", chunk, 0, kMostRows),
        .groups = count_of("groups", groups.data()),
        .parts = check_in("parts", parts, 1, kMostRows),
        .room = check_in("room", room, 1, kMostParts),
        .in_part = check_in("in_part", in_part, 1, kMostRows),
        .levels = levels_of(levels, chunk, keys.rows),
        .iterations = check_in("iterations", iterations, 0, INT32_MAX),
        .key_iterations = check_in("key_iterations", key_iterations, 0, INT32_MAX),
        .sample = check_in("sample", sample, 0, INT32_MAX),
        .looked_at = looked_at,
        .party = check_in("party", party, 1, kMostRows),
        .near = near,
        .reach = check_in("reach", reach, std::max<int64_t>(1, near), INT64_MAX),
        .sinks = check_in("sinks", sinks, 0, kMostRows),
        .sunk = chunk ? std::min(sinks, keys.rows) : 0,
        .scale = scale,
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    check_product("parts", (double(parts) + 1) * (double(chunk) + 1));
    check_rank("rows", rows, 3);
    int64_t batch = queries.batch, all = 0, width = check_in("rows", size_of(rows, 2), call.sunk, kMostRows);
    for (const auto& level : call.levels) all += level.blocks * level.clusters.room;
    int64_t total = parts * room, listed = static_cast<int64_t>(call.levels.size()) * keys.rows;
    check_in("clusters", keys.rows + all, 0, kMostRows);
    check_in("rows", parts * width, 0, kMostRows);
    check_in("picks", total, 0, near ? kMostRows / near : kMostRows);
    if (!chunk && width != all) refuse("rows", std::to_string(all) + " of a part", std::to_string(width));
    int64_t largest = chunk ? std::min(call.levels.back().size * chunk, keys.rows) : keys.rows;
    if (!wide && largest > INT16_MAX) refuse("wide", "True, as a cluster may have so many keys", "False");
    check_count("clusters", clusters, chunk ? 4 : 3);
    check_count("chunks", chunks, chunk ? 5 : 0);
    auto ints = [&](const char* name, const Tensor& x, const Shape& shape) { return data_of<int32_t>(name, x, shape); };
    Shape of_groups{batch, queries.heads, total, width}, of_clusters{batch, keys.heads, all};
    NearFarPlan plan{
        .order = ints("order", order, {batch, queries.heads, queries.rows}),
        .offsets = ints("offsets", offsets, {batch, queries.heads, total + 1}),
        .bounds = ints("bounds", bounds, {4, batch, queries.heads, total}),
        .rows = ints("rows", rows, {batch, parts, width}),
        .picks = {.keys = ints("picks", picks, {batch, queries.heads, total * near}),
                  .narrow = wide ? nullptr : data_of<int16_t>("left", left, of_groups),
                  .wide = wide ? data_of<int32_t>("left", left, of_groups) : nullptr},
        .cluster_order = ints("clusters", clusters[0], {batch, keys.heads, listed}),
        .cluster_start = ints("clusters", clusters[1], of_clusters),
        .cluster_stop = ints("clusters", clusters[2], of_clusters),
        .cluster_position = chunk ? ints("clusters", clusters[3], of_clusters) : nullptr,
        .width = width,
        .listed = listed,
        .clusters = all,
        .chunk_order = chunk ? ints("chunks", chunks[0], {batch, queries.rows}) : nullptr,
        .chunk_offsets = chunk ? ints("chunks", chunks[1], {batch, parts + 1}) : nullptr,
        .chunk_keys = chunk ? ints("chunks", chunks[2], {batch, keys.rows}) : nullptr,
        .chunk_start = chunk ? ints("chunks", chunks[3], {batch, parts}) : nullptr,
        .chunk_stop = chunk ? ints("chunks", chunks[4], {batch, parts}) : nullptr,
    };
    working(8 * (call.q.numbers() + call.k.numbers()), call.threads, [&] { kernels().planning.near_far(call, plan); });
}

static void cross_polytope(const Tensor& x, const Tensor& mask, const Tensor& columns, int64_t heads, int64_t rounds,
                           int64_t seed, int64_t layer, int64_t threads, const Tensor& buckets) {
    Rows rows = rows_of("x", x);
    check_in("heads", heads, 0, kMostRows);
    check_heads("heads", heads, rows.heads);
    PolytopeCall call{
        .x = rows,
        .heads = heads,
        .rounds = check_in("rounds", rounds, 0, kMostParts),
        .mask = mask_of("mask", mask, rows),
        .columns = data_of<int64_t>("columns", columns, {rows.batch}),
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    for (int64_t b = 0; b < rows.batch; b++) check_in("columns", call.columns[b], 0, kMostParts);
    auto* to = data_of<int64_t>("buckets", buckets, {rows.batch, heads, rounds, rows.rows});
    Working working;
    kernels().planning.cross_polytope(call, to);
}

static Parts parts_of(const Tensor& order, const Tensor& start, const Tensor& stop, const Rows& rows) {
    check_rank("order", order, 2);
    check_rank("start", start, 2);
    int64_t slots = size_of(order, 1), count = check_in("start", size_of(start, 1), 0, kMostRows);
    return {
        .slots = slots,
        .count = count,
        .order = data_of<int32_t>("order", order, {rows.batch, slots}),
        .start = data_of<int32_t>("start", start, {rows.batch, count}),
        .stop = data_of<int32_t>("stop", stop, {rows.batch, count}),
    };
}

static void kmeans(const Tensor& x, const Tensor& order, const Tensor& start, const Tensor& stop,
                   const std::optional<Tensor>& counts, const std::optional<Tensor>& given, int64_t clusters,
                   int64_t iterations, int64_t sample, bool unit, bool per_head, int64_t seed, int64_t layer,
                   int64_t threads, const Tensor& labels, const Tensor& centroids) {
    Rows rows = rows_of("x", x);
    Parts parts = parts_of(order, start, stop, rows);
    check_in("clusters", clusters, 1, kMostParts);
    Shape centers{rows.batch, rows.heads, parts.count * clusters, rows.dim};
    KmeansCall call{
        .x = rows,
        .parts = parts,
        .clusters = clusters,
        .iterations = check_in("iterations", iterations, 0, INT32_MAX),
        .sample = check_in("sample", sample, 0, INT32_MAX),
        .counts = data_of<int64_t>("counts", counts, {rows.batch, parts.count}),
        .given = data_of<double>("centroids", given, centers),
        .unit = unit,
        .per_head = per_head,
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    auto* label = data_of<int64_t>("labels", labels, {rows.batch, rows.heads, rows.rows});
    auto* center = data_of<double>("centroids", centroids, centers);
    Working working;
    check_parts(parts, rows);
    kernels().planning.kmeans(call, label, center);
}

static void halve(const Tensor& x, const Tensor& order, const Tensor& start, const Tensor& stop, const Tensor& leaves,
                  const Tensor& together, int64_t threads, const Tensor& halved) {
    Rows rows = rows_of("x", x);
    Parts parts = parts_of(order, start, stop, rows);
    HalveCall call{
        .x = rows,
        .parts = parts,
        .leaves = data_of<int64_t>("leaves", leaves, {rows.batch, parts.count}),
        .together = data_of<int64_t>("together", together, {rows.batch}),
        .threads = check_threads(threads),
    };
    auto* to = data_of<int32_t>("halved", halved, {rows.batch, rows.heads, parts.slots});
    for (int64_t i = 0; i < rows.batch * parts.count; i++) check_in("leaves", call.leaves[i], 0, kMostRows);
    for (int64_t b = 0; b < rows.batch; b++) check_in("together", call.together[b], 1, kMostRows);
    Working working;
    check_parts(parts, rows);
    kernels().planning.halve(call, to);
}

static void hamming_kmeans(const Tensor& x, const Tensor& mask, int64_t clusters, int64_t iterations, int64_t bits,
                           int64_t seed, int64_t layer, int64_t threads, const Tensor& labels) {
    Rows rows = rows_of("x", x);
    HammingCall call{
        .x = rows,
        .clusters = check_in("clusters", clusters, 1, kMostParts),
        .iterations = check_in("iterations", iterations, 0, INT32_MAX),
        .bits = check_in("bits", bits, 1, kMostParts),
        .mask = mask_of("mask", mask, rows),
        .draws = draws_of(seed, layer),
        .threads = check_threads(threads),
    };
    check_in("clusters * bits", clusters * bits, 1, int64_t{1} << 30);
    auto* label = data_of<int64_t>("labels", labels, {rows.batch, rows.heads, rows.rows});
    Working working;
    kernels().planning.hamming_kmeans(call, label);
}

static void cluster_means(const Tensor& x, const Tensor& mask, const Tensor& labels, int64_t clusters, int64_t threads,
                          const Tensor& means) {
    Rows rows = rows_of("x", x);
    MeansCall call{
        .x = rows,
        .clusters = check_in("clusters", clusters, 0, kMostParts),
        .mask = mask_of("mask", mask, rows),
        .threads = check_threads(threads),
    };
    auto* label = data_of<int64_t>("labels", labels, {rows.batch, rows.heads, rows.rows});
    auto* to = data_of<double>("means", means, {rows.batch, rows.heads, clusters, rows.dim});
    check_labels(label, nullptr, static_cast<int64_t>(labels.size()), clusters);
    Working working;
    kernels().planning.cluster_means(call, label, to);
}

// What stands for groups of queries, (batch, heads, groups, dim) float64, beside the keys that it is compared with.
template <class T>
static const T* queries_of(const Tensor& queries, const Rows& keys) {
    auto* data = data_of<T>("queries", queries, {keys.batch, size_of(queries, 1), size_of(queries, 2), keys.dim});
    check_heads("queries", size_of(queries, 1), keys.heads);
    return data;
}

static void top_keys(const Tensor& queries, const Tensor& k, const Tensor& mask, const std::optional<Tensor>& limits,
                     int64_t count, bool unit, int64_t threads, const Tensor& top) {
    Rows keys = rows_of("k", k);
    check_rank("queries", queries, 4);
    check_in("count", count, 0, kMostRows);
    auto* query = queries_of<double>(queries, keys);
    TopCall call{
        .k = keys,
        .heads = size_of(queries, 1),
        .queries = size_of(queries, 2),
        .count = count,
        .mask = mask_of("mask", mask, keys),
        .limits = data_of<int64_t>("limits", limits, {keys.batch, size_of(queries, 2)}),
        .unit = unit,
        .threads = check_threads(threads),
    };
    auto* to = data_of<int64_t>("top", top, {keys.batch, call.heads, call.queries, count});
    Working working;
    kernels().planning.top_keys(call, query, to);
}

static void near_keys(const Tensor& queries, const Tensor& k, const std::vector<Tensor>& clusters,
                      const Tensor& visible, const Tensor& seen, const Tensor& used, const Tensor& together,
                      int64_t near, int64_t reach, bool wide, int64_t room, int64_t threads, const Tensor& picks,
                      const Tensor& left) {
    Rows keys = rows_of("k", k);
    check_rank("queries", queries, 4);
    check_rank("visible", visible, 3);
    int64_t chunks = size_of(visible, 1), width = check_in("visible", size_of(visible, 2), 0, kMostRows);
    check_in("head size", keys.dim, 0, int64_t{1} << 16);  // sums of products of bytes fit into 32 bits
    check_in("near", near, 0, kMostRows);
    check_in("reach", reach, std::max<int64_t>(1, near), INT64_MAX);
    check_in("room", room, 0, kMostRows);
    int team = check_threads(threads);
    auto* query = queries_of<float>(queries, keys);
    if (clusters.empty()) refuse("clusters", "order, start and stop", "nothing");
    NearCall call{
        .k = keys,
        .heads = size_of(queries, 1),
        .groups = size_of(queries, 2),
        .chunks = chunks,
        .width = width,
        .near = near,
        .reach = reach,
        .room = room,
        .clusters = segments_of("clusters", clusters, keys.batch, keys.heads, team),
        .visible = data_of<int32_t>("visible", visible, {keys.batch, chunks, width}),
        .seen = data_of<int32_t>("seen", seen, {keys.batch, chunks}),
        .used = data_of<int64_t>("used", used, {keys.batch, chunks}),
        .together = data_of<int64_t>("together", together, {keys.batch, chunks}),
        .threads = team,
    };
    for (int64_t i = 0; i < keys.batch * chunks; i++) check_in("together", call.together[i], 1, kMostRows);
    Shape shape{keys.batch, call.heads, call.groups, room};
    Picks found{
        .keys = data_of<int32_t>("picks", picks, {keys.batch, call.heads, call.groups * near}),
        .narrow = wide ? nullptr : data_of<int16_t>("left", left, shape),
        .wide = wide ? data_of<int32_t>("left", left, shape) : nullptr,
    };
    working(8 * call.k.numbers(), call.threads, [&] {
        check_near(call, wide);
        kernels().planning.near_keys(call, query, found);
    });
}

static void decode(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& real, const Tensor& rank,
                   const Tensor& codes, const Tensor& tops, const Tensor& order, const Tensor& offsets,
                   const Tensor& mean_keys, const Tensor& mean_values, const Tensor& key_steps,
                   const Tensor& value_steps, const Tensor& labels, const Tensor& block_sizes, const Tensor& block_keys,
                   const Tensor& block_values, const Tensor& block_key_steps, const Tensor& block_value_steps,
                   int64_t chunk, int64_t per, int64_t sinks, int64_t near, int64_t reach, int64_t wider, int64_t shown,
                   int64_t least, double scale, int64_t threads, const Tensor& out,
                   const std::optional<Tensor>& picks) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    Rows values = rows_of("v", v, {keys.batch, keys.heads, keys.rows, size_of(v, 3)});
    check_shape("q", q, {keys.batch, queries.heads, queries.rows, keys.dim});
    check_heads("q", queries.heads, keys.heads);
    check_in("head size", keys.dim, 1, int64_t{1} << 16);
    check_rank("order", order, 3);
    check_rank("offsets", offsets, 3);
    check_rank("labels", labels, 4);
    int64_t places = size_of(order, 2), clusters = size_of(offsets, 2) - 1, blocks = size_of(labels, 2), lanes = 16;
    auto padded = [&](int64_t dim) { return (dim + lanes - 1) / lanes * lanes; };
    const bool narrow = has_dtype(order, nb::dlpack::dtype_code::UInt, 8);
    if (places % lanes) refuse("order", "a multiple of 16 places", std::to_string(places));
    check_in("offsets", clusters, 0, kMostRows);
    check_in("per", per, 1, kMostRows);
    check_in("labels", blocks, 0, kMostRows / per);
    Shape lead{keys.batch, keys.heads};
    auto shape = [&](std::initializer_list<int64_t> rest) {
        Shape whole = lead;
        whole.insert(whole.end(), rest);
        return whole;
    };
    DecodeCall call{
        .q = queries,
        .k = keys,
        .v = values,
        .real = data_of<int32_t>("real", real, {keys.batch, keys.rows}),
        .rank = data_of<int32_t>("rank", rank, {keys.batch, queries.rows}),
        .codes = data_of<uint8_t>("codes", codes, shape({places / lanes, padded(keys.dim) / 8, lanes, 4})),
        .tops = data_of<uint16_t>("tops", tops, shape({places})),
        .narrow = narrow ? data_of<uint8_t>("order", order, shape({places})) : nullptr,
        .wide = narrow ? nullptr : data_of<int32_t>("order", order, shape({places})),
        .offsets = data_of<int32_t>("offsets", offsets, shape({clusters + 1})),
        .mean_keys = data_of<int16_t>("mean_keys", mean_keys, shape({clusters, padded(keys.dim)})),
        .mean_values = data_of<int16_t>("mean_values", mean_values, shape({clusters, padded(values.dim)})),
        .key_steps = data_of<float>("key_steps", key_steps, shape({clusters})),
        .value_steps = data_of<float>("value_steps", value_steps, shape({clusters})),
        .labels = data_of<int32_t>("labels", labels, shape({blocks, 4 * per})),
        .block_sizes = data_of<int32_t>("block_sizes", block_sizes, shape({blocks * per})),
        .block_keys = data_of<int16_t>("block_keys", block_keys, shape({blocks * per, padded(keys.dim)})),
        .block_values = data_of<int16_t>("block_values", block_values, shape({blocks * per, padded(values.dim)})),
        .block_key_steps = data_of<float>("block_key_steps", block_key_steps, shape({blocks * per})),
        .block_value_steps = data_of<float>("block_value_steps", block_value_steps, shape({blocks * per})),
        .places = places,
        .clusters = clusters,
        .blocks = blocks,
        .chunk = check_in("chunk", chunk, 1, kMostRows),
        .per = per,
        .sinks = check_in("sinks", sinks, 0, kMostRows),
        .near = check_in("near", near, 0, kMostRows),
        .reach = check_in("reach", reach, std::max<int64_t>(1, near), INT64_MAX),
        .wider = check_in("wider", wider, 1, kMostRows),
        .shown = check_in("shown", shown, 1, kMostRows),
        .least = check_in("least", least, 0, INT64_MAX),
        .scale = static_cast<float>(scale),
        .threads = check_threads(threads),
        .out = data_of<float>("out", out, {keys.batch, queries.heads, queries.rows, values.dim}),
        .picks = data_of<int32_t>("picks", picks, {keys.batch, queries.heads, queries.rows, near}),
    };
    for (int64_t i = 0; i < keys.batch * queries.rows; i++) check_in("rank", call.rank[i], -1, keys.rows - 1);
    Working working;
    kernels().decode(call);
}

static void decode_all(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& real,
                       const Tensor& seen, double scale, int64_t threads, const Tensor& out) {
    Rows queries = rows_of("q", q), keys = rows_of("k", k);
    Rows values = rows_of("v", v, {keys.batch, keys.heads, keys.rows, size_of(v, 3)});
    check_shape("q", q, {keys.batch, queries.heads, queries.rows, keys.dim});
    check_heads("q", queries.heads, keys.heads);
    AllKeysCall call{
        .q = queries,
        .k = keys,
        .v = values,
        .real = mask_of("real", real, keys),
        .seen = data_of<int32_t>("seen", seen, {keys.batch, queries.rows}),
        .scale = static_cast<float>(scale),
        .threads = check_threads(threads),
        .out = data_of<float>("out", out, {keys.batch, queries.heads, queries.rows, values.dim}),
    };
    for (int64_t i = 0; i < keys.batch * queries.rows; i++) check_in("seen", call.seen[i], 0, keys.rows);
    if (!out.size()) return;
    Working working;
    kernels().decode_all(call);
}

// The first `rows` rows of each head, which are about to be written.
static void prefer_large_rows(const Tensor& x, int64_t rows) {
    Rows all = rows_of("x", x);
    check_in("rows", rows, 0, all.rows);
    int64_t size = all.kind == Kind::f32 ? 4 : 2;
    check_strides("x", x, 0);
    for (int64_t b = 0; b < all.batch; b++)
        for (int64_t h = 0; h < all.heads; h++)
            prefer_large_pages(const_cast<char*>(all.row(b, h, 0)), rows * all.dim * size);
}

static void finish(const Tensor& k, const Tensor& v, const Tensor& labels, const Tensor& samples, int64_t first_place,
                   int64_t first_rank, int64_t first_cluster, int64_t clusters, int64_t chunk, int64_t threads,
                   const Tensor& codes, const Tensor& tops, const Tensor& order, const Tensor& offsets,
                   const Tensor& mean_keys, const Tensor& mean_values, const Tensor& key_steps,
                   const Tensor& value_steps) {
    Rows keys = rows_of("k", k);
    Rows values = rows_of("v", v, {keys.batch, keys.heads, keys.rows, size_of(v, 3)});
    check_in("head size", keys.dim, 1, int64_t{1} << 16);
    check_rank("order", order, 3);
    check_rank("offsets", offsets, 3);
    int64_t all = size_of(order, 0), places = size_of(order, 2), room = size_of(offsets, 2) - 1, lanes = 16;
    auto padded = [&](int64_t dim) { return (dim + lanes - 1) / lanes * lanes; };
    const bool narrow = has_dtype(order, nb::dlpack::dtype_code::UInt, 8);
    if (places % lanes) refuse("order", "a multiple of 16 places", std::to_string(places));
    check_in("clusters", clusters, 0, room);
    check_in("first_cluster", first_cluster, 0, room - clusters);
    check_in("k", keys.rows, 0, places);
    check_in("first_place", first_place, 0, places - keys.rows);
    FinishCall call{
        .k = keys,
        .v = values,
        .labels = data_of<int64_t>("labels", labels, {keys.batch, keys.heads, keys.rows}),
        .samples = data_of<int64_t>("samples", samples, {keys.batch}),
        .clusters = clusters,
        .first_cluster = first_cluster,
        .all_clusters = room,
        .first_place = first_place,
        .places = places,
        .first_rank = check_in("first_rank", first_rank, 0, kMostRows),
        .chunk = check_in("chunk", chunk, 1, narrow ? 256 : kMostRows),
        .threads = check_threads(threads),
        .codes = data_of<uint8_t>("codes", codes, {all, keys.heads, places / lanes, padded(keys.dim) / 8, lanes, 4}),
        .tops = data_of<uint16_t>("tops", tops, {all, keys.heads, places}),
        .narrow = narrow ? data_of<uint8_t>("order", order, {all, keys.heads, places}) : nullptr,
        .wide = narrow ? nullptr : data_of<int32_t>("order", order, {all, keys.heads, places}),
        .offsets = data_of<int32_t>("offsets", offsets, {all, keys.heads, room + 1}),
        .mean_keys = data_of<int16_t>("mean_keys", mean_keys, {all, keys.heads, room, padded(keys.dim)}),
        .mean_values = data_of<int16_t>("mean_values", mean_values, {all, keys.heads, room, padded(values.dim)}),
        .key_steps = data_of<float>("key_steps", key_steps, {all, keys.heads, room}),
        .value_steps = data_of<float>("value_steps", value_steps, {all, keys.heads, room}),
    };
    check_labels(call.labels, nullptr, static_cast<int64_t>(labels.size()), clusters);
    for (int64_t s = 0; s < keys.batch; s++) check_in("samples", call.samples[s], 0, all - 1);
    Working working;
    kernels().finish(call);
}

NB_MODULE(_native, m) {
    using namespace nb::literals;
    using Maybe = std::optional<Tensor>;
    using Several = std::vector<Tensor>;
    nb::exception<Malformed>(m, "Malformed", PyExc_ValueError);
    nb::class_<Tensors>(m, "Tensors")
        .def(nb::init<Tensor, Tensor, Tensor, Several, Several, Several, Several, std::vector<int64_t>, Tensor, Maybe,
                      Several, Several, Maybe, Maybe, Maybe>(),
             "q"_a, "k"_a, "v"_a, "rounds"_a, "biases"_a, "skips"_a, "counts"_a, "layout"_a, "offset"_a,
             "self_keys"_a.none(), "query_means"_a, "key_means"_a, "mask"_a.none(), "key_mask"_a.none(),
             "query_mask"_a.none());
    nb::class_<Settings>(m, "Settings")
        .def(nb::init<bool, bool, double, double, int64_t, int64_t>(), "causal"_a, "once"_a, "scale"_a, "dropout_p"_a,
             "seed"_a, "threads"_a);
    m.def("forward", forward, "tensors"_a, "settings"_a, "out"_a, "lse"_a, "alone"_a.none());
    m.def("backward", backward, "tensors"_a, "settings"_a, "out"_a, "lse"_a, "alone"_a.none(), "grad_out"_a,
          "grad_lse"_a, "grad_q"_a, "grad_k"_a, "grad_v"_a, "grad_mask"_a.none());
    m.def("decode", decode, "q"_a, "k"_a, "v"_a, "real"_a, "rank"_a, "codes"_a, "tops"_a, "order"_a, "offsets"_a,
          "mean_keys"_a, "mean_values"_a, "key_steps"_a, "value_steps"_a, "labels"_a, "block_sizes"_a, "block_keys"_a,
          "block_values"_a, "block_key_steps"_a, "block_value_steps"_a, "chunk"_a, "per"_a, "sinks"_a, "near"_a,
          "reach"_a, "wider"_a, "shown"_a, "least"_a, "scale"_a, "threads"_a, "out"_a, "picks"_a.none());
    m.def("decode_all", decode_all, "q"_a, "k"_a, "v"_a, "real"_a.none(), "seen"_a, "scale"_a, "threads"_a, "out"_a);
    m.def("prefer_large_pages", prefer_large_rows, "x"_a, "rows"_a);
    m.def("finish", finish, "k"_a, "v"_a, "labels"_a, "samples"_a, "first_place"_a, "first_rank"_a, "first_cluster"_a,
          "clusters"_a, "chunk"_a, "threads"_a, "codes"_a, "tops"_a, "order"_a, "offsets"_a, "mean_keys"_a,
          "mean_values"_a, "key_steps"_a, "value_steps"_a);
    m.def("adopt_team", [](uintptr_t address) { adopt_team(reinterpret_cast<Team>(address)); });
    m.def("regions", [] {
        Regions& all = regions();
        return nb::make_tuple(all.count.load(), double(all.held.load()) * 1e-9, double(all.idle.load()) * 1e-9);
    });
    m.def("instruction_set", [] { return std::string(kernels().name); });

    m.def("order_by", order_by, "scores"_a, "mask"_a, "order"_a, "threads"_a);
    m.def("group_by", group_by, "labels"_a, "mask"_a, "groups"_a, "order"_a, "offsets"_a, "threads"_a);
    m.def("smyrf_orders", smyrf_orders, "q"_a, "k"_a, "query_mask"_a, "key_mask"_a, "groups"_a, "rounds"_a,
          "transform"_a, "e2lsh"_a, "seed"_a, "layer"_a, "threads"_a, "query_order"_a, "key_order"_a);
    m.def("smyrf_groups", smyrf_groups, "q"_a, "k"_a, "query_mask"_a, "key_mask"_a, "cluster_size"_a, "rounds"_a,
          "transform"_a, "e2lsh"_a, "seed"_a, "layer"_a, "threads"_a, "query_order"_a, "key_order"_a, "query_offsets"_a,
          "key_offsets"_a);
    m.def("neighbours", neighbours, "query_mask"_a, "key_mask"_a, "offset"_a, "block"_a, "back"_a, "ahead"_a,
          "query_order"_a, "query_offsets"_a, "key_order"_a, "key_start"_a, "key_stop"_a);
    m.def("self_keys", self_keys, "query_mask"_a, "key_mask"_a, "offset"_a, "selves"_a);
    m.def("clustered", clustered, "q"_a, "k"_a, "query_mask"_a, "key_mask"_a, "clusters"_a, "iterations"_a, "bits"_a,
          "top"_a, "scale"_a, "seed"_a, "layer"_a, "threads"_a, "far"_a, "near"_a);
    m.def("borrow_answers", borrow_answers, "out"_a, "lse"_a, "answer"_a, "mass"_a.none(), "threads"_a, "merged"_a,
          "masses"_a);
    m.def("near_far", near_far, "q"_a, "k"_a, "query_mask"_a, "key_mask"_a, "offset"_a, "chunk"_a, "groups"_a,
          "parts"_a, "room"_a, "in_part"_a, "levels"_a, "iterations"_a, "key_iterations"_a, "sample"_a, "looked_at"_a,
          "party"_a, "near"_a, "reach"_a, "wide"_a, "sinks"_a, "scale"_a, "seed"_a, "layer"_a, "threads"_a, "order"_a,
          "offsets"_a, "bounds"_a, "rows"_a, "picks"_a, "left"_a, "clusters"_a, "chunks"_a);
    m.def("cross_polytope", cross_polytope, "x"_a, "mask"_a, "columns"_a, "heads"_a, "rounds"_a, "seed"_a, "layer"_a,
          "threads"_a, "buckets"_a);
    m.def("kmeans", kmeans, "x"_a, "order"_a, "start"_a, "stop"_a, "counts"_a.none(), "given"_a.none(), "clusters"_a,
          "iterations"_a, "sample"_a, "unit"_a, "per_head"_a, "seed"_a, "layer"_a, "threads"_a, "labels"_a,
          "centroids"_a);
    m.def("halve", halve, "x"_a, "order"_a, "start"_a, "stop"_a, "leaves"_a, "together"_a, "threads"_a, "halved"_a);
    m.def("hamming_kmeans", hamming_kmeans, "x"_a, "mask"_a, "clusters"_a, "iterations"_a, "bits"_a, "seed"_a,
          "layer"_a, "threads"_a, "labels"_a);
    m.def("cluster_means", cluster_means, "x"_a, "mask"_a, "labels"_a, "clusters"_a, "threads"_a, "means"_a);
    m.def("top_keys", top_keys, "queries"_a, "k"_a, "mask"_a, "limits"_a.none(), "count"_a, "unit"_a, "threads"_a,
          "top"_a);
    m.def("near_keys", near_keys, "queries"_a, "k"_a, "clusters"_a, "visible"_a, "seen"_a, "used"_a, "together"_a,
          "near"_a, "reach"_a, "wide"_a, "room"_a, "threads"_a, "picks"_a, "left"_a);
}
