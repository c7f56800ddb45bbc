// Planning: hashing and sorting, k-means, top keys, cross-polytope buckets.
#pragma once

#include "arrays.h"

namespace coterie {

struct OrderShape {
    int64_t lists, lists_per_mask, length;
};

struct HashCall {
    int64_t batch, heads, key_heads, rounds;
    Rows q, k;
    const uint8_t *query_mask, *key_mask;
    int transform;  // 0 smyrf, 1 none, 2 l2-alsh, 3 xbox, 4 simple
    bool buckets;   // E2LSH
    const int64_t* groups;
    uint64_t seed;
    int64_t layer;
    int threads;
};

struct KmeansCall {
    int64_t batch, heads, rows, dim, clusters, iterations, bits;
    const uint8_t* mask;
    uint64_t seed;
    int64_t layer;
    int threads;
};

struct TopCall {
    int64_t batch, heads, key_heads, queries, count;
    Rows k;
    const uint8_t* mask;
    const int64_t* limits;  // (batch, queries): how many keys a query may see; null for all
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
    void (*smyrf_orders)(const HashCall&, int32_t*, int32_t*);
    void (*euclidean_kmeans)(const KmeansCall&, const double*, int64_t*, double*);
    void (*hamming_kmeans)(const KmeansCall&, const Rows&, int64_t*);
    void (*cluster_means)(const KmeansCall&, const Rows&, const int64_t*, double*);
    void (*top_keys)(const TopCall&, const double*, int64_t*);
    void (*cross_polytope)(const PolytopeCall&, int64_t*);
};

}  // namespace coterie
