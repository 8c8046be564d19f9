// One pass of a Llama-like decoder over some tokens on CPU cores; compiled_rows.py calls it once per pass.
//
// Decoding reads every weight once per token, so it is bound by memory bandwidth if nothing else takes time. Hence one
// call for all layers, persistent threads, quantized weights that become floats only in registers, and float32
// everywhere else: the result is that of a float32 model with the same (dequantized) weights.
//
// Vectors are the compiler's extension (GCC, Clang), 16 floats wide; narrower processors use several registers.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::this_thread::yield(); }
#endif

namespace {

constexpr int LANES = 16;  // rows of a packed group, and floats in a vector
constexpr int BLOCK = 32;  // weights that share a scale

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT4 = 2, INT5 = 3, INT8 = 4 };

}  // namespace

// Arguments from Python; kernel_library.py declares the same structures.
extern "C" {

struct Matrix {
    const uint8_t* data;  // floats: rows as in torch; packed kinds: groups of 16 rows (quantized_blocks.py)
    const float* bias;
    int64_t rows, columns;
    int64_t kind;
};

struct Layer {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
    Matrix query, key, value, output, gate, up, down;
    int64_t window;  // positions that attention sees; 0 for all
};

struct Map {  // replaces a run of dropped layers, as repairs.py defines it
    Matrix down, up, gate, lift, out;  // gate.data is null if the map has no neurons
};

struct Model {
    int64_t hidden, heads, key_value_heads, head_size, neurons, layers;
    float epsilon, scale;
    const Layer* layer;
    const float* final_norm;
    Matrix head;
    Matrix embedding;          // a row of floats for each token
    Matrix join;               // a draft head's: makes its state from the model's states; or without data
    const float* beside_norm;  // of `beside`, if there is any
};

struct Segment {  // tokens of one depth
    int64_t first, count;
    const Map* const* map;  // by layer: the map that runs instead of it, or null
};

struct Pass {
    int64_t tokens, batch;
    const int64_t* ids;                   // tokens to embed, into `beside` or else `state`; null if that is done
    const int64_t *row, *column;          // of each token: its text, and its position in it
    const float *cosine, *sine;           // by position: (positions, head_size)
    float* state;                         // (tokens, hidden): embeddings in, hidden states after the last layer out
    void* const* keys;                    // by layer: (place, heads, head_size)
    void* const* values;
    const int64_t* table;     // (layers, texts, most): which block holds a text's positions
    int64_t most, block;      // blocks per text, and positions per block
    int64_t halves;           // keys and values are bfloat16
    const int64_t* running;   // by layer: how many of the first tokens run it
    const Segment* segment;   // for tokens that do not run a layer: their maps
    int64_t segments;
    const int64_t* wanted;  // tokens whose logits are requested
    int64_t logits_wanted;
    float* logits;  // (logits_wanted, vocabulary)
    int64_t* best;  // for each row of logits, the place of the first of the highest; or null
    float* share;   // and its share of the softmax; or null
    int64_t threads;
    float* beside;  // (tokens, hidden): normalized and concatenated before the normalized state for q, k and v; or null
    const float* joined;  // (tokens, join.columns): the states that `join` makes `state` from; or null
    float* const* saved;  // by layer: where a copy of the state after it goes, (tokens, hidden), or null; or null for all
};

// A window of lossless decoding in one call: a draft head's drafts, their verification, and what of them is right.
struct Window {
    const Model *model, *head;  // the head may be null: then all drafts are given
    Pass *verification, *read;  // of one text; their numbers of tokens, and what goes with those, are set here
    int64_t *ids, *columns, *read_columns, *running;  // what the two point to, with room for a window
    Segment* segment;
    const int64_t* vocabulary;  // the token of each of the head's logits
    int64_t length;             // verified positions before ids[0], which the drafts follow
    int64_t given, most;        // drafts that are in `ids` already, and how many more the head may add

    // Verified tokens that the head has not run, ids[0] being the last, and the model's states before each of them.
    int64_t *unread, unread_count, unread_room, read_count;
    float* unread_states;
    const int64_t* states;  // the layers that these are saved after
    int64_t states_count;

    // How likely drafts are right, by their share of the softmax. Drafting ends where the next one is not worth its time,
    // and drafts that are not worth verifying are left out.
    const float *bounds, *likelihoods;
    int64_t bounds_count;
    float next_pays_above, verified_above;

    int64_t drafted, verified, accepted;  // found here, as is what follows
    float* shares;                        // of each draft
    double draft_seconds, verify_seconds;
};

}  // extern "C"

namespace {

template <class V>
inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline F as_float(U bits) {
    F value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline F splat(float value) { return value - F{}; }

// Pairwise: a loop over lanes would be one long dependency chain.
inline float sum(F v) {
    typedef float F8 __attribute__((vector_size(32)));
    typedef float F4 __attribute__((vector_size(16)));
    F8 eight[2];
    std::memcpy(eight, &v, sizeof v);
    eight[0] += eight[1];
    F4 four[2];
    std::memcpy(four, eight, sizeof four);
    four[0] += four[1];
    return (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
}

// e to the power of x, with the polynomial of the Cephes library: within 2 ulp.
inline F exponential(F x) {
    x = x < -87.0f ? splat(-87.0f) : x;
    x = x > 88.0f ? splat(88.0f) : x;
    F whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    F rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    F y = splat(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    I exponent = (__builtin_convertvector(whole, I) + 127) << 23;
    F power;
    std::memcpy(&power, &exponent, sizeof power);
    return y * power;
}

inline F silu(F x) { return x / (1.0f + exponential(-x)); }

// Float16 to float32 with integer operations, so any processor works: shift the exponent, then rescale.
inline F halves(const uint8_t* from) {
    U bits = __builtin_convertvector(load<Halves>(from), U);
    F magnitude = as_float((bits & 0x7fffu) << 13) * 0x1p112f;
    U raw;
    std::memcpy(&raw, &magnitude, sizeof raw);
    return as_float(raw | ((bits & 0x8000u) << 16));
}

inline float from_bfloat16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even, as torch rounds
}

// ---------------------------------------------------------------------------------------------------------------------
// Products: 16 rows of a matrix times T vectors. `x` and `sums` have one row per token.

struct Vectors {
    const float* x;
    int64_t stride;
    const float* sums;  // of each block of 32 elements of x, for packed kinds
    int64_t sums_stride;
};

constexpr int64_t bytes_of(int kind) {  // per group of 16 rows by 32 columns
    return kind == INT4 ? 320 : kind == INT5 ? 352 : 544;
}

// Independent accumulators: a single one would be bound by the latency of additions. As many for every T, so that a
// token's sums do not depend on how many tokens share the reading of a weight.
constexpr int CHAINS = 2;

// Keeps a loaded vector in its register. Otherwise the compiler loads it again for each of its shifts, and loads, with
// those of x, are what several tokens are bound by.
template <class V>
inline void hold(V& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#else
    (void)value;
#endif
}

// Bits go to the top of the mantissa, giving 1 + q / 16: and-or instead of a conversion. `sums` corrects for the 1.
template <int T>
inline void block_int4(const uint8_t* data, const float* const (&x)[T], F (&sum)[T][CHAINS]) {
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
        U packed = load<U>(data + 64 * word);
        hold(packed);
#pragma GCC unroll 8
        for (int place = 0; place < 8; ++place) {
            U moved = place < 5 ? packed << (19 - 4 * place) : packed >> (4 * place - 19);
            F weight = as_float((moved & 0x780000u) | 0x3f800000u);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[t][place % CHAINS] += weight * x[t][8 * word + place];
        }
    }
}

template <int T>
inline void block_int5(const uint8_t* data, const float* const (&x)[T], F (&sum)[T][CHAINS]) {
    U high = load<U>(data + 256);  // the fifth bits: column k is bit k
#pragma GCC unroll 4
    for (int word = 0; word < 4; ++word) {
        U packed = load<U>(data + 64 * word);
        hold(packed);
#pragma GCC unroll 8
        for (int place = 0; place < 8; ++place) {
            int k = 8 * word + place;
            U moved = place < 5 ? packed << (18 - 4 * place) : packed >> (4 * place - 18);
            U fifth = k < 23 ? high << (22 - k) : high >> (k - 22);
            F weight = as_float((moved & 0x3c0000u) | (fifth & 0x400000u) | 0x3f800000u);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[t][place % CHAINS] += weight * x[t][k];
        }
    }
}

template <int T>
inline void block_int8(const uint8_t* data, const float* const (&x)[T], F (&sum)[T][CHAINS]) {
#pragma GCC unroll 8
    for (int word = 0; word < 8; ++word) {
        U packed = load<U>(data + 64 * word);
        hold(packed);
#pragma GCC unroll 4
        for (int place = 0; place < 4; ++place) {
            U moved = place < 2 ? packed << (15 - 8 * place) : packed >> (8 * place - 15);
            F weight = as_float((moved & 0x7f8000u) | 0x3f800000u);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sum[t][place % CHAINS] += weight * x[t][4 * word + place];
        }
    }
}

template <int T, int KIND>
void packed_group(const Matrix& m, int64_t group, const Vectors& in, int64_t token, F (&out)[T]) {
    const int64_t blocks = m.columns / BLOCK;
    const uint8_t* data = m.data + group * blocks * bytes_of(KIND);
    F total[T];
    for (int t = 0; t < T; ++t) total[t] = F{};
    for (int64_t block = 0; block < blocks; ++block, data += bytes_of(KIND)) {
        const float* x[T];
        F sums[T][CHAINS];
        for (int t = 0; t < T; ++t) {
            x[t] = in.x + (token + t) * in.stride + block * BLOCK;
            for (int c = 0; c < CHAINS; ++c) sums[t][c] = F{};
        }
        __builtin_prefetch(data + 2048);
        __builtin_prefetch(data + 2048 + 64);
        __builtin_prefetch(data + 2048 + 128);
        __builtin_prefetch(data + 2048 + 192);
        __builtin_prefetch(data + 2048 + 256);
        F scale = halves(data), offset = F{};
        if constexpr (KIND == INT4) {
            block_int4<T>(data + 64, x, sums);
            scale *= 16.0f;
            offset = halves(data + 32) - scale;
        } else if constexpr (KIND == INT5) {
            block_int5<T>(data + 32, x, sums);
            scale *= 32.0f;
            offset = scale * -1.5f;  // the mantissa's implicit 1, and the zero point 16 / 32
        } else {
            block_int8<T>(data + 32, x, sums);
            scale *= 256.0f;
            offset = scale * -1.5f;  // the implicit 1, and the zero point 128 / 256
        }
        for (int t = 0; t < T; ++t) {
            F sum = sums[t][0];
            for (int c = 1; c < CHAINS; ++c) sum += sums[t][c];
            total[t] += scale * sum;
            total[t] += offset * in.sums[(token + t) * in.sums_stride + block];
        }
    }
    for (int t = 0; t < T; ++t) out[t] = total[t];
}

// Float rows as torch stores them: nothing is copied, and changed weights take effect at once.
template <int T, int KIND>
void float_group(const Matrix& m, int64_t group, const Vectors& in, int64_t token, F (&out)[T]) {
    constexpr int ROWS = T <= 4 ? 4 : 2;
    constexpr int ITEM = KIND == FLOAT32 ? 4 : 2;
    float found[T][LANES];
    for (int64_t start = 0; start < LANES; start += ROWS) {
        const uint8_t* row[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            int64_t index = group * LANES + start + r;
            row[r] = m.data + (index < m.rows ? index : m.rows - 1) * m.columns * ITEM;
        }
        F sums[ROWS][T] = {};
        int64_t k = 0;
        for (; k + LANES <= m.columns; k += LANES) {
            F x[T];
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) x[t] = load<F>(in.x + (token + t) * in.stride + k);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                __builtin_prefetch(row[r] + ITEM * k + 1024);
                F weight;
                if constexpr (KIND == FLOAT32) weight = load<F>(row[r] + 4 * k);
                else weight = as_float(__builtin_convertvector(load<Halves>(row[r] + 2 * k), U) << 16);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) sums[r][t] += weight * x[t];
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                float value = sum(sums[r][t]);
                for (int64_t rest = k; rest < m.columns; ++rest) {
                    float weight = KIND == FLOAT32 ? load<float>(row[r] + 4 * rest)
                                                   : from_bfloat16(load<uint16_t>(row[r] + 2 * rest));
                    value += weight * in.x[(token + t) * in.stride + rest];
                }
                found[t][start + r] = value;
            }
    }
    for (int t = 0; t < T; ++t) out[t] = load<F>(found[t]);
}

template <int T>
void group_product(const Matrix& m, int64_t group, const Vectors& in, int64_t token, F (&out)[T]) {
    switch (m.kind) {
        case FLOAT32: float_group<T, FLOAT32>(m, group, in, token, out); break;
        case BFLOAT16: float_group<T, BFLOAT16>(m, group, in, token, out); break;
        case INT4: packed_group<T, INT4>(m, group, in, token, out); break;
        case INT5: packed_group<T, INT5>(m, group, in, token, out); break;
        default: packed_group<T, INT8>(m, group, in, token, out);
    }
    if (m.bias != nullptr)
        for (int t = 0; t < T; ++t)
            for (int64_t r = 0; r < LANES && group * LANES + r < m.rows; ++r) out[t][r] += m.bias[group * LANES + r];
}

inline int64_t groups(const Matrix& m) { return (m.rows + LANES - 1) / LANES; }

bool is_packed(const Matrix& m) { return m.kind >= INT4; }

void add_up(const float* x, int64_t columns, float* sums) {
    for (int64_t block = 0; block < columns / BLOCK; ++block)
        sums[block] = sum(load<F>(x + block * BLOCK) + load<F>(x + block * BLOCK + LANES));
}

template <int N>
struct Tile {
    static constexpr int size = N;
};

constexpr int64_t WIDEST_TILE = 8;

// Tiles of nearly equal size: a last tile of one token would unpack every weight for it alone.
template <class Work>
void in_tiles(int64_t tokens, Work work) {
    int64_t tiles = (tokens + WIDEST_TILE - 1) / WIDEST_TILE;
    for (int64_t token = 0; tiles > 0; --tiles) {
        const int64_t size = (tokens - token + tiles - 1) / tiles;
        switch (size) {
            case 1: work(token, Tile<1>{}); break;
            case 2: work(token, Tile<2>{}); break;
            case 3: work(token, Tile<3>{}); break;
            case 4: work(token, Tile<4>{}); break;
            case 5: work(token, Tile<5>{}); break;
            case 6: work(token, Tile<6>{}); break;
            case 7: work(token, Tile<7>{}); break;
            default: work(token, Tile<8>{});
        }
        token += size;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Persistent threads. A pass is a sequence of phases; in each, threads take work items until none are left.

class Team {
  public:
    // Each thread works through a share of its own, piece after piece: memory is read fastest as one long stream. On a
    // machine with other load threads are not equally fast, so whoever is done continues where another one is.
    template <class Work>
    void share(int64_t pieces, Work work) {
        const int64_t chunk = std::max<int64_t>(1, pieces / (threads_ * CHUNKS));
        const uint32_t phase = generation_.load(std::memory_order_relaxed) & 1;
        for (int64_t turn = 0; turn < threads_; ++turn) {
            const int64_t whose = (thread_ + turn) % threads_;
            const int64_t first = pieces * whose / threads_, last = pieces * (whose + 1) / threads_;
            std::atomic<int64_t>& taken = taken_[whose].by_phase[phase];
            for (int64_t start; (start = first + taken.fetch_add(chunk, std::memory_order_relaxed)) < last;)
                for (int64_t piece = start; piece < std::min(start + chunk, last); ++piece) work(piece);
        }
        taken_[thread_].by_phase[1 - phase].store(0, std::memory_order_relaxed);  // nobody is in the next phase yet
        wait_for_all();
    }

    template <class Job>
    void run(int64_t threads, Job& job) {
        forget_workers_of_a_parent();
        if (threads != threads_) taken_ = std::vector<Taken>(threads);
        threads_ = threads;
        thread_ = 0;
        call_job_ = [](void* context, int64_t thread) { (*static_cast<Job*>(context))(thread); };
        job_ = &job;
        finished_.store(0);
        while (workers_ < threads - 1) {
            const int64_t thread = ++workers_;
            const uint32_t seen = call_.load();
            std::thread([this, thread, seen] { serve(thread, seen); }).detach();
        }
        call_.fetch_add(1);
        call_.notify_all();
        call_job_(job_, 0);
        // Also wait for workers that are idle in this pass: they read fields that the next call writes.
        for (int64_t done; (done = finished_.load()) != workers_;) finished_.wait(done);
    }

  private:
    static constexpr int64_t CHUNKS = 16;  // of a thread's share
    // Spinning reacts fastest, but a preempted thread may need the core of the one that spins. So spin only briefly.
    static constexpr int SPINS = 1000;

    struct alignas(64) Taken {
        std::atomic<int64_t> by_phase[2] = {0, 0};  // pieces of a thread's share, in phases of either parity
    };

    void serve(int64_t thread, uint32_t seen) {
        thread_ = thread;
        for (;;) {
            for (int spin = 0; call_.load() == seen && spin < SPINS; ++spin) relax();
            call_.wait(seen);
            ++seen;
            if (thread < threads_) call_job_(job_, thread);
            finished_.fetch_add(1);
            finished_.notify_all();
        }
    }

    void wait_for_all() {
        const uint32_t generation = generation_.load();
        if (arrived_.fetch_add(1) == threads_ - 1) {
            arrived_.store(0);
            generation_.fetch_add(1);
            generation_.notify_all();
            return;
        }
        for (int spin = 0; generation_.load() == generation && spin < SPINS; ++spin) relax();
        generation_.wait(generation);
    }

    void forget_workers_of_a_parent() {
#if defined(__unix__) || defined(__APPLE__)
        if (process_ != getpid()) workers_ = 0;
        process_ = getpid();
#endif
    }

    alignas(64) std::atomic<uint32_t> call_{0};
    alignas(64) std::atomic<int64_t> finished_{0};
    alignas(64) std::atomic<int64_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) int64_t threads_ = 0;
    std::vector<Taken> taken_;
    int64_t workers_ = 0;
    long process_ = 0;
    void (*call_job_)(void*, int64_t) = nullptr;
    void* job_ = nullptr;
    static thread_local int64_t thread_;
};

thread_local int64_t Team::thread_ = 0;

// ---------------------------------------------------------------------------------------------------------------------
// The pass itself. Every thread runs all of it; every shared phase ends in a barrier.

constexpr int64_t FEW = 4;  // up to this many tokens each thread prepares vectors redundantly: cheaper than a barrier

// Consecutive tokens of one text, which attend to the same keys.
struct Run {
    int64_t first, count;
};

constexpr int64_t LONGEST_RUN = 8;
constexpr int64_t SCORES_IN_CACHE = 64 * 1024;  // floats, for all heads and tokens that a thread works on at once

struct Scratch {
    std::vector<Run> runs;
    std::vector<float> normal, sums, query, key, value, attended, middle, low, scores;

    static float* at_least(std::vector<float>& buffer, int64_t size) {
        if (int64_t(buffer.size()) < size) buffer.resize(size);
        return buffer.data();
    }
};

// Several matrices times the same vectors, as one phase.
template <int COUNT, class Store>
void products(Team& team, const Matrix* const (&matrices)[COUNT], const Vectors& x, int64_t tokens, Store store) {
    int64_t pieces = 0;
    for (const Matrix* matrix : matrices) pieces += groups(*matrix);
    team.share(pieces, [&](int64_t piece) {
        int which = 0;
        while (piece >= groups(*matrices[which])) piece -= groups(*matrices[which++]);
        const Matrix& matrix = *matrices[which];
        const int64_t row = piece * LANES, count = std::min<int64_t>(LANES, matrix.rows - row);
        in_tiles(tokens, [&](int64_t token, auto tile) {
            F out[tile.size];
            group_product<tile.size>(matrix, piece, x, token, out);
            for (int t = 0; t < tile.size; ++t) store(which, token + t, row, count, out[t]);
        });
    });
}

class Decoding {
  public:
    Decoding(const Model& model, const Pass& pass, Team& team, Scratch& scratch)
        : model_(model), pass_(pass), team_(team), heads_size_(model.heads * model.head_size),
          kept_size_(model.key_value_heads * model.head_size) {
        const int64_t n = pass.tokens, threads = pass.threads;
        int64_t neurons = model.neurons, rank = 1, longest = 0;
        for (int64_t segment = 0; segment < pass.segments; ++segment)
            for (int64_t layer = 0; layer < model.layers; ++layer)
                if (const Map* map = pass.segment[segment].map[layer]) {
                    rank = std::max(rank, map->down.rows);
                    neurons = std::max(neurons, map->gate.rows);
                }
        for (int64_t token = 0; token < n; ++token) longest = std::max(longest, pass.column[token] + 1);
        const int64_t read = pass.beside == nullptr ? model.hidden : 2 * model.hidden;
        widest_ = std::max({read, heads_size_, neurons, rank, model.join.columns}) / BLOCK + 1;
        longest_ = (longest + LANES - 1) / LANES * LANES;
        normal_ = Scratch::at_least(scratch.normal, std::max(n, threads * std::min(n, FEW)) * read);
        sums_ = Scratch::at_least(scratch.sums, threads * n * widest_);
        query_ = Scratch::at_least(scratch.query, n * heads_size_);
        key_ = Scratch::at_least(scratch.key, n * kept_size_);
        value_ = Scratch::at_least(scratch.value, n * kept_size_);
        attended_ = Scratch::at_least(scratch.attended, n * heads_size_);
        middle_ = Scratch::at_least(scratch.middle, n * neurons);
        low_ = Scratch::at_least(scratch.low, n * rank);
        embed();
        find_runs(scratch.runs);
        scores_ = Scratch::at_least(scratch.scores, threads * most_scores());
    }

    void operator()(int64_t thread) {
        int64_t executed = 0;
        if (pass_.joined != nullptr) join(thread);
        for (int64_t layer = 0; layer < model_.layers; ++layer) {
            const int64_t running = pass_.running[layer];
            if (running > 0) {
                attend(thread, layer, running);
                think(thread, model_.layer[layer], running);
                ++executed;
            }
            for (int64_t index = 0; index < pass_.segments; ++index) {
                const Segment& segment = pass_.segment[index];
                if (segment.first >= running && segment.map[layer] != nullptr)
                    repair(thread, *segment.map[layer], segment.first, segment.count);
            }
            // Each layer ends with a barrier, and the next has one before it changes the state.
            if (thread == 0 && pass_.saved != nullptr && pass_.saved[layer] != nullptr)
                std::memcpy(pass_.saved[layer], pass_.state, pass_.tokens * model_.hidden * sizeof(float));
        }
        if (thread == 0) executed_ = executed;
        say(thread);
    }

    int64_t executed() const { return executed_; }

  private:
    void embed() const {
        if (pass_.ids == nullptr) return;
        float* to = pass_.beside == nullptr ? pass_.state : pass_.beside;
        const Matrix& table = model_.embedding;
        const int64_t columns = table.columns;
        for (int64_t token = 0; token < pass_.tokens; ++token, to += columns) {
            if (table.kind == FLOAT32) {
                std::memcpy(to, table.data + 4 * columns * pass_.ids[token], 4 * columns);
                continue;
            }
            const uint8_t* from = table.data + 2 * columns * pass_.ids[token];
            for (int64_t i = 0; i < columns; ++i) to[i] = from_bfloat16(load<uint16_t>(from + 2 * i));
        }
    }

    void join(int64_t thread) {
        const Matrix* const one[1] = {&model_.join};
        Vectors x = as_they_are(thread, pass_.joined, model_.join.columns, is_packed(model_.join), pass_.tokens);
        products<1>(team_, one, x, pass_.tokens, [&](int, int64_t token, int64_t row, int64_t count, const F& values) {
            std::memcpy(pass_.state + token * model_.hidden + row, &values, count * sizeof(float));
        });
    }

    // For the first n tokens.
    void attend(int64_t thread, int64_t index, int64_t n) {
        const Layer& layer = model_.layer[index];
        const int64_t size = model_.head_size;
        const bool sums_too = is_packed(layer.query) || is_packed(layer.key) || is_packed(layer.value);
        Vectors x = normalised(thread, layer.attention_norm, model_.epsilon, sums_too, pass_.state, n, nullptr, pass_.beside);
        const Matrix* const matrices[3] = {&layer.query, &layer.key, &layer.value};
        float* const results[3] = {query_, key_, value_};
        products<3>(team_, matrices, x, n, [&](int which, int64_t token, int64_t row, int64_t count, const F& values) {
            std::memcpy(results[which] + token * matrices[which]->rows + row, &values, count * sizeof(float));
        });
        team_.share(n * (model_.heads + model_.key_value_heads), [&](int64_t piece) {
            const int64_t token = piece / (model_.heads + model_.key_value_heads);
            const int64_t head = piece % (model_.heads + model_.key_value_heads);
            if (head < model_.heads) {
                turn(query_ + token * heads_size_ + head * size, layer.query_norm, token);
            } else {
                const int64_t place = token * kept_size_ + (head - model_.heads) * size;
                turn(key_ + place, layer.key_norm, token);
                const int64_t column = pass_.column[token];
                const int64_t slot = stretch(index, token, column, column, head - model_.heads).start;
                keep(pass_.keys[index], slot, key_ + place);
                keep(pass_.values[index], slot, value_ + place);
            }
        });
        const int64_t runs = runs_before(n), together = heads_together(runs), pieces = model_.heads / together;
        team_.share(runs * pieces, [&](int64_t piece) {
            const Run& run = (*runs_)[piece / pieces];
            const Run own = {run.first, std::min(run.count, n - run.first)};
            const int64_t head = piece % pieces * together;
            if (pass_.halves) look<uint16_t>(thread, index, own, head, together);
            else look<float>(thread, index, own, head, together);
        });
        add_product(thread, layer.output, attended_, heads_size_, pass_.state, n);
    }

    void think(int64_t thread, const Layer& layer, int64_t n) {
        const bool sums_too = is_packed(layer.gate) || is_packed(layer.up);
        Vectors x = normalised(thread, layer.mlp_norm, model_.epsilon, sums_too, pass_.state, n);
        gate(layer.gate, layer.up, x, n);
        add_product(thread, layer.down, middle_, layer.gate.rows, pass_.state, n);
    }

    void repair(int64_t thread, const Map& map, int64_t first, int64_t n) {
        float* state = pass_.state + first * model_.hidden;
        Vectors x = normalised(thread, nullptr, 1e-6f, is_packed(map.down) || is_packed(map.gate), state, n);
        const Matrix* const down[1] = {&map.down};
        products<1>(team_, down, x, n, [&](int, int64_t token, int64_t row, int64_t count, const F& values) {
            std::memcpy(low_ + token * map.down.rows + row, &values, count * sizeof(float));
        });
        if (map.gate.data != nullptr) gate(map.gate, map.lift, x, n);
        add_product(thread, map.up, low_, map.down.rows, state, n);
        if (map.gate.data != nullptr) add_product(thread, map.out, middle_, map.gate.rows, state, n);
    }

    void say(int64_t thread) {
        const int64_t n = pass_.logits_wanted;
        if (n == 0) return;
        const bool sums_too = is_packed(model_.head);
        Vectors x = normalised(thread, model_.final_norm, model_.epsilon, sums_too, pass_.state, n, pass_.wanted);
        const Matrix* const head[1] = {&model_.head};
        products<1>(team_, head, x, n, [&](int, int64_t token, int64_t row, int64_t count, const F& values) {
            std::memcpy(pass_.logits + token * model_.head.rows + row, &values, count * sizeof(float));
        });
        if (pass_.best != nullptr) team_.share(n, [&](int64_t token) { choose(token); });
    }

    void choose(int64_t token) {
        const float* logits = pass_.logits + token * model_.head.rows;
        const int64_t count = model_.head.rows, whole = count / LANES * LANES;
        F highest = splat(logits[0]);
        for (int64_t i = 0; i < whole; i += LANES) {
            F values = load<F>(logits + i);
            highest = values > highest ? values : highest;
        }
        float best = *std::max_element(logits + whole - (whole == count), logits + count);
        for (int lane = 0; lane < LANES; ++lane) best = std::max(best, highest[lane]);
        pass_.best[token] = std::min<int64_t>(std::find(logits, logits + count, best) - logits, count - 1);
        if (pass_.share == nullptr) return;
        F total = F{};
        for (int64_t i = 0; i < whole; i += LANES) total += exponential(load<F>(logits + i) - best);
        float rest = 0;
        for (int64_t i = whole; i < count; ++i) rest += std::exp(logits[i] - best);
        pass_.share[token] = 1.0f / (sum(total) + rest);
    }

    // RMSNorm of the states, times the norm's weight, preceded by that of `beside` if given.
    Vectors normalised(int64_t thread, const float* weight, float epsilon, bool sums_too, const float* states,
                       int64_t n, const int64_t* chosen = nullptr, const float* beside = nullptr) {
        const int64_t hidden = model_.hidden, stride = beside == nullptr ? hidden : 2 * hidden;
        const bool alone = n <= FEW;
        float* normal = normal_ + (alone ? thread * n * stride : 0);
        float* sums = sums_ + (alone ? thread * n * widest_ : 0);
        auto one = [&](int64_t token) {
            float* const whole = normal + token * stride;
            if (beside != nullptr) normalise(beside + token * hidden, model_.beside_norm, epsilon, whole);
            normalise(states + (chosen == nullptr ? token : chosen[token]) * hidden, weight, epsilon, whole + (stride - hidden));
            if (sums_too) add_up(whole, stride, sums + token * widest_);
        };
        if (alone)
            for (int64_t token = 0; token < n; ++token) one(token);
        else
            team_.share(n, one);
        return {normal, stride, sums, widest_};
    }

    void normalise(const float* state, const float* weight, float epsilon, float* to) const {
        const int64_t hidden = model_.hidden;
        F squares[2] = {F{}, F{}};
        int64_t k = 0;
        for (; k + 2 * LANES <= hidden; k += 2 * LANES)
            for (int half = 0; half < 2; ++half) {
                F x = load<F>(state + k + half * LANES);
                squares[half] += x * x;
            }
        float total = sum(squares[0] + squares[1]);
        for (; k < hidden; ++k) total += state[k] * state[k];
        const float scale = 1.0f / std::sqrt(total / hidden + epsilon);
        if (weight == nullptr)
            for (int64_t i = 0; i < hidden; ++i) to[i] = state[i] * scale;
        else
            for (int64_t i = 0; i < hidden; ++i) to[i] = weight[i] * (state[i] * scale);
    }

    Vectors as_they_are(int64_t thread, const float* x, int64_t stride, bool sums_too, int64_t n) {
        const bool alone = n <= FEW;
        float* sums = sums_ + (alone ? thread * n * widest_ : 0);
        auto one = [&](int64_t token) { add_up(x + token * stride, stride, sums + token * widest_); };
        if (sums_too && alone)
            for (int64_t token = 0; token < n; ++token) one(token);
        else if (sums_too)
            team_.share(n, one);
        return {x, stride, sums, widest_};
    }

    void add_product(int64_t thread, const Matrix& matrix, const float* from, int64_t stride, float* state, int64_t n) {
        Vectors x = as_they_are(thread, from, stride, is_packed(matrix), n);
        const Matrix* const one[1] = {&matrix};
        products<1>(team_, one, x, n, [&](int, int64_t token, int64_t row, int64_t count, const F& values) {
            float* to = state + token * model_.hidden + row;
            for (int64_t i = 0; i < count; ++i) to[i] += values[i];
        });
    }

    void gate(const Matrix& gates, const Matrix& lifts, const Vectors& x, int64_t n) {
        team_.share(groups(gates), [&](int64_t piece) {
            const int64_t row = piece * LANES, count = std::min<int64_t>(LANES, gates.rows - row);
            in_tiles(n, [&](int64_t token, auto tile) {
                F open[tile.size], lifted[tile.size];
                group_product<tile.size>(gates, piece, x, token, open);
                group_product<tile.size>(lifts, piece, x, token, lifted);
                for (int t = 0; t < tile.size; ++t) {
                    F values = silu(open[t]) * lifted[t];
                    std::memcpy(middle_ + (token + t) * gates.rows + row, &values, count * sizeof(float));
                }
            });
        });
    }

    // Head norm (if the model has one) and rotary embedding of one head.
    void turn(float* head, const float* norm, int64_t token) {
        const int64_t size = model_.head_size, half = size / 2;
        if (norm != nullptr) {
            float total = 0;
            for (int64_t i = 0; i < size; ++i) total += head[i] * head[i];
            const float scale = 1.0f / std::sqrt(total / size + model_.epsilon);
            for (int64_t i = 0; i < size; ++i) head[i] = norm[i] * (head[i] * scale);
        }
        const int64_t at = pass_.column[token] * size;
        const float *cosine = pass_.cosine + at, *sine = pass_.sine + at;
        for (int64_t i = 0; i < half; ++i) {
            const float low = head[i], high = head[i + half];
            head[i] = low * cosine[i] - high * sine[i];
            head[i + half] = high * cosine[i + half] + low * sine[i + half];
        }
    }

    void keep(void* cache, int64_t slot, const float* from) {
        for (int64_t i = 0; i < model_.head_size; ++i)
            if (pass_.halves) static_cast<uint16_t*>(cache)[slot + i] = to_bfloat16(from[i]);
            else static_cast<float*>(cache)[slot + i] = from[i];
    }

    static F wide(const float* from) { return load<F>(from); }
    static F wide(const uint16_t* from) { return as_float(__builtin_convertvector(load<Halves>(from), U) << 16); }
    static float single(float value) { return value; }
    static float single(uint16_t value) { return from_bfloat16(value); }

    struct Stretch {
        int64_t start, step, count;
    };

    // Where a head's keys for columns from `first` on are stored, as far as they have a constant stride (one block).
    Stretch stretch(int64_t index, int64_t token, int64_t first, int64_t last, int64_t head) const {
        const int64_t size = model_.head_size, heads = model_.key_value_heads, row = pass_.row[token];
        const int64_t* blocks = pass_.table + (index * pass_.batch + row) * pass_.most;
        const int64_t within = first % pass_.block, place = blocks[first / pass_.block] * pass_.block + within;
        return {(place * heads + head) * size, heads * size, std::min(last - first + 1, pass_.block - within)};
    }

    void find_runs(std::vector<Run>& runs) {
        runs.clear();
        longest_run_ = 1;
        for (int64_t token = 0; token < pass_.tokens; ++token) {
            const bool goes_on = token > 0 && pass_.row[token] == pass_.row[token - 1];
            if (goes_on && runs.back().count < LONGEST_RUN) ++runs.back().count;
            else runs.push_back({token, 1});
            longest_run_ = std::max(longest_run_, runs.back().count);
        }
        runs_ = &runs;
    }

    // How many runs contain some of the first n tokens.
    int64_t runs_before(int64_t n) const {
        const auto starts_before = [n](const Run& run) { return run.first < n; };
        return std::partition_point(runs_->begin(), runs_->end(), starts_before) - runs_->begin();
    }

    // How many heads a thread takes at once. All of them reads keys in memory order; otherwise those that share keys.
    // Either only if every thread still gets several items and the scores stay in cache.
    int64_t heads_together(int64_t runs) const {
        const int64_t sharing = model_.heads / model_.key_value_heads;
        for (const int64_t together : {model_.heads, sharing}) {
            const bool enough = runs * (model_.heads / together) >= 4 * pass_.threads;
            if (enough && longest_run_ * together * longest_ <= SCORES_IN_CACHE) return together;
        }
        return 1;
    }

    int64_t most_scores() const {
        return std::max(SCORES_IN_CACHE, longest_run_ * longest_);
    }

    struct Columns {
        int64_t first, last;

        int64_t count() const { return last - first + 1; }
    };

    // The columns that a token attends to in a layer.
    Columns visible(int64_t index, int64_t token) const {
        const int64_t last = pass_.column[token], window = model_.layer[index].window;
        return {window > 0 ? std::max<int64_t>(0, last - window + 1) : 0, last};
    }

    // Attention of some heads of a run, over visible columns only. Keys and values are read from memory once for all
    // heads and tokens, block by block. Each head of each token sums in the order it would alone.
    template <class Kept>
    void look(int64_t thread, int64_t index, const Run& run, int64_t first_head, int64_t heads) {
        float* scores = scores_ + thread * most_scores();
        const auto scores_of = [&](int64_t token, int64_t head) {
            return scores + ((token - run.first) * heads + head - first_head) * longest_;
        };
        const int64_t size = model_.head_size;
        by_blocks<Kept>(index, run, first_head, heads, pass_.keys[index],
                        [&](int64_t token, int64_t head, int64_t from, int64_t count, const Kept* key, int64_t step) {
                            score(query_ + token * heads_size_ + head * size, key, step, count,
                                  scores_of(token, head) + from);
                        });
        for (int64_t token = run.first; token < run.first + run.count; ++token)
            for (int64_t head = first_head; head < first_head + heads; ++head) {
                weigh(scores_of(token, head), visible(index, token).count());
                std::memset(attended_ + token * heads_size_ + head * size, 0, size * sizeof(float));
            }
        by_blocks<Kept>(index, run, first_head, heads, pass_.values[index],
                        [&](int64_t token, int64_t head, int64_t from, int64_t count, const Kept* value, int64_t step) {
                            mix(value, step, count, scores_of(token, head) + from,
                                attended_ + token * heads_size_ + head * size);
                        });
    }

    // Calls `work` for each head of each token with each stretch of visible columns, in order.
    template <class Kept, class Work>
    void by_blocks(int64_t index, const Run& run, int64_t first_head, int64_t heads, const void* cache, Work work) const {
        const int64_t sharing = model_.heads / model_.key_value_heads;
        Columns all = visible(index, run.first);
        for (int64_t token = run.first + 1; token < run.first + run.count; ++token) {
            all.first = std::min(all.first, visible(index, token).first);
            all.last = std::max(all.last, visible(index, token).last);
        }
        for (int64_t column = all.first; column <= all.last;) {
            const Stretch at = stretch(index, run.first, column, all.last, 0);
            for (int64_t head = first_head; head < first_head + heads; ++head) {
                const Kept* kept = static_cast<const Kept*>(cache) + at.start + head / sharing * model_.head_size;
                for (int64_t token = run.first; token < run.first + run.count; ++token) {
                    const Columns seen = visible(index, token);
                    const int64_t from = std::max(column, seen.first), to = std::min(column + at.count - 1, seen.last);
                    if (from <= to)
                        work(token, head, from - seen.first, to - from + 1, kept + (from - column) * at.step, at.step);
                }
            }
            column += at.count;
        }
    }

    template <class Kept>
    void score(const float* query, const Kept* key, int64_t step, int64_t count, float* scores) const {
        const int64_t size = model_.head_size, whole = size / LANES * LANES;
        for (int64_t c = 0; c < count; ++c, key += step) {
            F products = F{};
            for (int64_t i = 0; i < whole; i += LANES) products += load<F>(query + i) * wide(key + i);
            float score = sum(products);
            for (int64_t i = whole; i < size; ++i) score += query[i] * single(key[i]);
            scores[c] = score * model_.scale;
        }
    }

    // Softmax.
    static void weigh(float* scores, int64_t count) {
        const int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int64_t c = count; c < padded; ++c) scores[c] = -1e30f;
        float highest = scores[0];
        for (int64_t c = 1; c < count; ++c) highest = std::max(highest, scores[c]);
        F total = F{};
        for (int64_t c = 0; c < padded; c += LANES) {
            F weights = exponential(load<F>(scores + c) - highest);  // padding gives 1e-38
            total += weights;
            std::memcpy(scores + c, &weights, sizeof weights);
        }
        const float share = 1.0f / sum(total);
        for (int64_t c = 0; c < count; ++c) scores[c] *= share;
    }

    template <class Kept>
    void mix(const Kept* value, int64_t step, int64_t count, const float* shares, float* out) const {
        const int64_t size = model_.head_size;
        int64_t i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES) mix_lanes<4>(value + i, step, count, shares, out + i);
        for (; i + LANES <= size; i += LANES) mix_lanes<1>(value + i, step, count, shares, out + i);
        for (; i < size; ++i)
            for (int64_t c = 0; c < count; ++c) out[i] += shares[c] * single(value[c * step + i]);
    }

    template <int WIDTH, class Kept>
    static void mix_lanes(const Kept* value, int64_t step, int64_t count, const float* shares, float* out) {
        F mixed[WIDTH];
        for (int w = 0; w < WIDTH; ++w) mixed[w] = load<F>(out + w * LANES);
        for (int64_t c = 0; c < count; ++c, value += step)
            for (int w = 0; w < WIDTH; ++w) mixed[w] += wide(value + w * LANES) * shares[c];
        for (int w = 0; w < WIDTH; ++w) std::memcpy(out + w * LANES, &mixed[w], sizeof mixed[w]);
    }

    const Model& model_;
    const Pass& pass_;
    Team& team_;
    const int64_t heads_size_, kept_size_;
    const std::vector<Run>* runs_;
    int64_t widest_, longest_, longest_run_, executed_ = 0;
    float *normal_, *sums_, *query_, *key_, *value_, *attended_, *middle_, *low_, *scores_;
};

}  // namespace

namespace {

struct Everyone {
    std::mutex alone;
    Team team;
    Scratch scratch;
};

// Never destroyed: workers are still waiting on the team at process exit.
Everyone& everyone() {
    static Everyone& only = *new Everyone;
    return only;
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The parts of a window, each a pass.
class Windowed {
  public:
    Windowed(Window& window, Everyone& all) : window_(window), all_(all) {}

    void run() {
        if (window_.most > 0 && window_.unread_count > BACKLOG) read(window_.unread_count - 1, false);
        const double begun = now();
        draft();
        const double drafted = now();
        verify();
        window_.draft_seconds = drafted - begun;
        window_.verify_seconds = now() - drafted;
        if (window_.head != nullptr) take();
    }

  private:
    // Verified tokens to read before a draft, beyond which they follow a pause and say nothing about the time of drafts.
    static constexpr int64_t BACKLOG = 6;

    // Drafts follow one another while they are likely enough to be right, all together.
    void draft() {
        Window& w = window_;
        w.drafted = w.verified = w.given;
        if (w.most == 0) return;
        float likely = 1.0f;
        read(w.unread_count, true);
        for (;;) {
            const float share = *w.read->share;
            likely *= w.likelihoods[std::upper_bound(w.bounds, w.bounds + w.bounds_count, share) - w.bounds];
            w.shares[w.drafted] = share;
            w.ids[++w.drafted] = w.vocabulary[*w.read->best];
            if (likely > w.verified_above) w.verified = w.drafted;
            if (w.drafted == w.given + w.most || likely <= w.next_pays_above) return;
            pass_of_head(w.ids + w.drafted, 1, nullptr, w.read_count + w.drafted - w.given - 1, true);
        }
    }

    // Runs the head on the first unread tokens for good.
    void read(int64_t count, bool wants_logits) {
        Window& w = window_;
        const int64_t width = w.head->join.columns;
        pass_of_head(w.unread, count, w.unread_states, w.read_count, wants_logits);
        w.read_count += count;
        w.unread_count -= count;
        std::memmove(w.unread, w.unread + count, w.unread_count * sizeof *w.unread);
        std::memmove(w.unread_states, w.unread_states + count * width, w.unread_count * width * sizeof(float));
    }

    // The state of the last token is left in the first row, where the pass after the next draft expects it.
    void pass_of_head(const int64_t* ids, int64_t count, const float* joined, int64_t position, bool wants_logits) {
        Window& w = window_;
        Pass& pass = *w.read;
        int64_t running = count;
        const int64_t last = count - 1;
        const Map* none = nullptr;
        const Segment whole = {0, count, &none};
        for (int64_t i = 0; i < count; ++i) w.read_columns[i] = position + i;
        pass.tokens = count;
        pass.ids = ids;
        pass.joined = joined;
        pass.running = &running;
        pass.segment = &whole;
        pass.wanted = &last;
        pass.logits_wanted = wants_logits;
        Decoding decoding(*w.head, pass, all_.team, all_.scratch);
        all_.team.run(pass.threads, decoding);
        std::memmove(pass.state, pass.state + last * w.head->hidden, w.head->hidden * sizeof(float));
    }

    void verify() {
        Window& w = window_;
        Pass& pass = *w.verification;
        const int64_t tokens = w.verified + 1;
        for (int64_t i = 0; i < tokens; ++i) w.columns[i] = w.length + i;
        std::fill_n(w.running, w.model->layers, tokens);
        w.segment->count = pass.tokens = pass.logits_wanted = tokens;
        Decoding decoding(*w.model, pass, all_.team, all_.scratch);
        all_.team.run(pass.threads, decoding);
        w.accepted = 0;
        while (w.accepted < w.verified && w.ids[w.accepted + 1] == pass.best[w.accepted]) ++w.accepted;
    }

    // What is right has been verified, and is the head's to read.
    void take() {
        Window& w = window_;
        const Pass& pass = *w.verification;
        const int64_t kept = w.accepted + 1, hidden = w.model->hidden;
        if (w.unread_count + kept > w.unread_room) read(w.unread_count, false);
        for (int64_t i = 0; i < kept; ++i) {
            w.unread[w.unread_count] = pass.best[i];
            float* to = w.unread_states + w.unread_count++ * w.head->join.columns;
            for (int64_t k = 0; k < w.states_count; ++k)
                std::memcpy(to + k * hidden, pass.saved[w.states[k]] + i * hidden, hidden * sizeof(float));
        }
    }

    Window& window_;
    Everyone& all_;
};

}  // namespace

extern "C" {

// Returns the number of layers that ran, or -1 if a token has no embedding.
int64_t depthdecay_pass(const Model* model, const Pass* pass) {
    if (pass->ids != nullptr)
        for (int64_t token = 0; token < pass->tokens; ++token)
            if (pass->ids[token] < 0 || pass->ids[token] >= model->embedding.rows) return -1;
    Everyone& all = everyone();
    std::lock_guard<std::mutex> lock(all.alone);
    Decoding decoding(*model, *pass, all.team, all.scratch);
    all.team.run(pass->threads, decoding);
    return decoding.executed();
}

void depthdecay_window(Window* window) {
    Everyone& all = everyone();
    std::lock_guard<std::mutex> lock(all.alone);
    Windowed(*window, all).run();
}

// Checked on load: if Python's struct layout differed, arguments would be garbage.
int64_t depthdecay_sizes() {
    return ((sizeof(Model) * 1000 + sizeof(Layer)) * 1000 + sizeof(Pass)) * 1000 + sizeof(Window);
}

}  // extern "C"
