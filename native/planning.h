// Planning: hashing and sorting, k-means, top keys, near keys.
#pragma once

#include "arrays.h"
#include "draws.h"
#include "layout.h"

namespace coterie {

struct OrderShape {
    int64_t lists, length;
};

struct HashCall {
    Rows q, k;
    const uint8_t *query_mask, *key_mask;
    const int64_t* groups;  // (batch): what E2LSH fits its buckets to
    int64_t rounds;
    int transform;  // 0 smyrf, 1 none, 2 l2-alsh, 3 xbox, 4 simple
    bool buckets;  // E2LSH
    Draws draws;
    int threads;
};

struct PolytopeCall {
    Rows x;
    int64_t heads, rounds;  // heads share the rows of x
    const uint8_t* mask;
    const int64_t* columns;  // (batch)
    Draws draws;
    int threads;
};

struct HammingCall {
    Rows x;
    int64_t clusters, iterations, bits;
    const uint8_t* mask;
    Draws draws;
    int threads;
};

// Part p of sample b holds the rows order[b, start[b, p] … stop[b, p]); parts have no row in common.
struct Parts {
    int64_t slots, count;
    const int32_t *order, *start, *stop;

    int64_t first(int64_t b, int64_t part) const { return start[b * count + part]; }
    int64_t size(int64_t b, int64_t part) const { return stop[b * count + part] - first(b, part); }
    const int32_t* rows(int64_t b, int64_t part) const { return order + b * slots + first(b, part); }
};

struct KmeansCall {
    Rows x;
    Parts parts;
    int64_t clusters, iterations;
    int64_t sample;  // train on at most so many rows a cluster; 0 is no limit
    const int64_t* counts;  // (batch, parts): clusters of a part; null for all
    const double* given;  // (batch, heads, parts, clusters, dim): to start from; or null
    bool unit;  // rows and centroids count by their direction
    bool per_head;  // each head draws for itself
    Draws draws;
    int threads;
};

struct HalveCall {
    Rows x;
    Parts parts;
    const int64_t* leaves;  // (batch, parts)
    const int64_t* together;  // (batch): leaves that are not split from each other
    int threads;
};

struct MeansCall {
    Rows x;
    int64_t clusters;
    const uint8_t* mask;
    int threads;
};

struct TopCall {
    Rows k;
    int64_t heads, queries, count;
    const uint8_t* mask;
    const int64_t* limits;  // (batch, queries): how many keys a query may see; null for all
    bool unit;  // keys count by their direction
    int threads;
};

// Groups of queries, equally many to each chunk of which the first `used` (batch, chunks) exist. `together` of them
// (batch, chunks), from the first of a chunk on, search the same clusters, until those hold `reach` keys, and each
// picks `near`.
struct NearCall {
    Rows k;
    int64_t heads, groups, chunks, width, near, reach, room;
    Segments clusters;
    const int32_t *visible, *seen;  // (batch, chunks, width): the first `seen` (batch, chunks) of them
    const int64_t *used, *together;
    int threads;

    int64_t share() const { return groups / chunks; }  // the groups of a chunk
};

// What groups meet: keys (batch, heads, groups · near), and how many keys are left (batch, heads, groups, room) of each
// cluster that the group sees, as int16 or int32; 1 behind those.
struct Picks {
    int32_t* keys;
    int16_t* narrow;
    int32_t* wide;
};

// Blocks of so many chunks, and the clusters of their keys. Without chunks, one block is all.
struct NearFarLevel {
    int64_t size, blocks;
    Count clusters;
};

// The plan of near–far attention; `near_far.h` makes it. Groups of queries are made in parts, at most `room` in each:
// in chunks if causal.
struct NearFarCall {
    Rows q, k;
    const uint8_t *query_mask, *key_mask;
    const int32_t* offset;  // (batch)
    int64_t chunk;  // keys of a chunk; 0 if not causal
    Count groups;  // of a sample, or of a chunk
    int64_t parts, room, in_part;
    std::vector<NearFarLevel> levels;
    int64_t iterations, key_iterations, sample;
    int64_t looked_at, party, near, reach, sinks;
    int64_t sunk;  // sinks that there are at most
    double scale;
    Draws draws;
    int threads;
};

// What its rounds and means hold.
struct NearFarPlan {
    int32_t *order, *offsets;  // (batch, heads, Nq), (batch, heads, groups + 1)
    int32_t* bounds;  // (4, batch, heads, groups): where each group's far and near rows start and stop
    int32_t* rows;  // (batch, parts, width): the far rows of a part
    Picks picks;
    int32_t* cluster_order;  // (batch, key heads, listed)
    int32_t *cluster_start, *cluster_stop, *cluster_position;  // (batch, key heads, clusters)
    int64_t width, listed, clusters;
    int32_t *chunk_order, *chunk_offsets, *chunk_keys;  // if causal: (batch, Nq), (batch, parts + 1), (batch, Nk)
    int32_t *chunk_start, *chunk_stop;  // (batch, parts)
};

struct PlanningKernels {
    void (*order_by)(const float*, const uint8_t*, const OrderShape&, int32_t*, int);
    void (*group_by)(const int64_t*, const uint8_t*, const OrderShape&, int64_t, int32_t*, int32_t*, int);
    void (*smyrf_orders)(const HashCall&, int32_t*, int32_t*);
    void (*cross_polytope)(const PolytopeCall&, int64_t*);
    void (*kmeans)(const KmeansCall&, int64_t*, double*);
    void (*halve)(const HalveCall&, int32_t*);
    void (*hamming_kmeans)(const HammingCall&, int64_t*);
    void (*cluster_means)(const MeansCall&, const int64_t*, double*);
    void (*top_keys)(const TopCall&, const double*, int64_t*);
    void (*near_keys)(const NearCall&, const float*, const Picks&);
    void (*near_far)(const NearFarCall&, const NearFarPlan&);
};

}  // namespace coterie
