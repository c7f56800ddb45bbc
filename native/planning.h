// Planning: hashing and sorting, k-means, top keys, cross-polytope buckets.
#pragma once

#include "arrays.h"

namespace coterie {

struct OrderShape {
    int64_t lists, length;
};

struct HashCall {
    int64_t batch, heads, key_heads, rounds;
    Rows q, k;
    const uint8_t *query_mask, *key_mask;
    int transform;  // 0 smyrf, 1 none, 2 l2-alsh, 3 xbox, 4 simple
    bool buckets;  // E2LSH
    const int64_t* groups;
    uint64_t seed;
    int64_t layer;
    int threads;
};

struct HammingCall {
    int64_t batch, heads, rows, dim, clusters, iterations, bits;
    const uint8_t* mask;
    uint64_t seed;
    int64_t layer;
    int threads;
};

// Part p of sample b holds the rows order[b, start[b, p] … stop[b, p]); parts have no row in common.
struct KmeansCall {
    int64_t batch, heads, parts, slots;
    Rows x;
    const int32_t *order, *start, *stop;
    const int64_t* counts;  // (batch, parts): clusters of a part; null for all
    const double* given;  // (batch, heads, parts, clusters, dim): to start from; or null
    int64_t clusters, iterations, sample;  // train on at most `sample` rows a cluster; 0 is no limit
    bool unit;  // rows and centroids count by their direction
    bool per_head;  // each head draws for itself
    uint64_t seed;
    int64_t layer;
    int threads;
};

struct MeansCall {
    int64_t batch, heads, clusters;
    Rows x;
    const uint8_t* mask;
    int threads;
};

struct NearCall {
    int64_t batch, heads, key_heads, groups, chunks, visible_width, near, reach;  // a chunk has groups / chunks groups
    Rows k;
    Segments clusters;
    const int32_t *visible, *seen;  // (batch, chunks, width): the last `seen` (batch, chunks) of them
    int threads;
};

struct TopCall {
    int64_t batch, heads, key_heads, queries, count;
    Rows k;
    const uint8_t* mask;
    const int64_t* limits;  // (batch, queries): how many keys a query may see; null for all
    bool unit;  // keys count by their direction
    int threads;
};

struct PolytopeCall {
    int64_t batch, heads, row_heads, rounds;
    Rows x;
    const uint8_t* mask;
    const int64_t* columns;  // (batch)
    uint64_t seed;
    int64_t layer;
    int threads;
};

struct PlanningKernels {
    void (*order_by)(const float*, const uint8_t*, const OrderShape&, int32_t*, int);
    void (*group_by)(const int64_t*, const uint8_t*, const OrderShape&, int64_t, int32_t*, int32_t*, int);
    void (*smyrf_orders)(const HashCall&, int32_t*, int32_t*);
    void (*kmeans)(const KmeansCall&, int64_t*, double*);
    void (*hamming_kmeans)(const HammingCall&, const Rows&, int64_t*);
    void (*cluster_means)(const MeansCall&, const int64_t*, double*);
    void (*top_keys)(const TopCall&, const double*, int64_t*);
    void (*near_keys)(const NearCall&, const double*, int32_t*, float*);
    void (*cross_polytope)(const PolytopeCall&, int64_t*);
};

}  // namespace coterie
