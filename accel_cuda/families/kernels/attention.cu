// Attention of every form and element type: what cuDNN does not compute. A warp takes four queries of one head, and 32 keys at a time, of which each lane
// has the scores of one; weights and sums are relative to the largest score so far.
//
// A key that a query does not see has weight 0, and its value is left out: it may be no number. A query that sees no key gives zeros.

constexpr int ROWS = 4;
constexpr int KEYS = 32;
enum { ALL = 0, TOP_LEFT = 1, BOTTOM_RIGHT = 2 };

template <class W> struct alignas(ROWS * sizeof(W)) Row { W v[ROWS]; };

struct Steps { i64 batch, head, row; };  // in elements; `batch` is that of a page where keys lie in pages

struct Attention {
  const void *q, *k, *v;
  void* o;
  const void* bias;  // or 0, as all that follow
  const i32 *lengths_q, *lengths_kv;  // of each batch
  const i32 *begins_q, *begins_kv;    // where the sequences of one array begin; one number more than there are batches
  const i32* table;                   // pages of each batch
  i64 batch, heads, kv_heads, seq_q, seq_kv, dim, value_dim, causal, window, page_size, most_pages;
  i64 tokens_q, tokens_kv, pages;  // how many there are in one array, and in a cache
  Steps of_q, of_k, of_v, of_o, of_bias;
  double scale;
  void* stats;  // the logarithm of each query's sum of exponentials, (batch, heads, queries), or 0
};

template <class W> DEVICE W warp_most(W x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
template <class W> DEVICE W warp_sum(W x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
template <class W> DEVICE W nothing() { return (W)__int_as_float(0xff800000); }  // -infinity

// Lengths, offsets and tables may say anything: each number is taken as the nearest of 0 to `most`.
DEVICE i64 within(i64 x, i64 most) { return max((i64)0, min(x, most)); }

// Where a batch's queries and keys begin, and how many there are.
struct Span {
  i64 rows, seq_q, seq_kv, first_q, first_kv;  // rows are all that is written
  DEVICE Span(const Attention& g, i64 batch) : rows(g.seq_q), seq_q(g.seq_q), seq_kv(g.seq_kv), first_q(0), first_kv(0) {
    if (g.begins_q) {
      first_q = within(g.begins_q[batch], g.tokens_q), first_kv = within(g.begins_kv[batch], g.tokens_kv);
      rows = seq_q = within(within(g.begins_q[batch + 1], g.tokens_q) - first_q, g.seq_q);
      seq_kv = within(within(g.begins_kv[batch + 1], g.tokens_kv) - first_kv, g.seq_kv);
    }
    if (g.lengths_q) seq_q = within(g.lengths_q[batch], seq_q);
    if (g.lengths_kv) seq_kv = within(g.lengths_kv[batch], seq_kv);
  }
};

template <class T> struct Keys {
  const T *k, *v;
  i64 step_k, step_v, page_k, page_v, page_size, last_page;
  const i32* table;
  DEVICE Keys(const Attention& g, const Span& span, i64 batch, i64 head)
      : step_k(g.of_k.row), step_v(g.of_v.row), page_k(g.of_k.batch), page_v(g.of_v.batch), page_size(g.page_size),
        last_page(g.pages - 1), table(g.table) {
    i64 at = table ? 0 : batch;
    k = (const T*)g.k + at * g.of_k.batch + head * g.of_k.head + span.first_kv * step_k;
    v = (const T*)g.v + at * g.of_v.batch + head * g.of_v.head + span.first_kv * step_v;
    if (table) table += batch * g.most_pages;
  }
  DEVICE i64 page(i64 j) const { return within(table[j / page_size], last_page); }
  DEVICE const T* key(i64 j) const { return table ? k + page(j) * page_k + j % page_size * step_k : k + j * step_k; }
  DEVICE const T* value(i64 j) const { return table ? v + page(j) * page_v + j % page_size * step_v : v + j * step_v; }
};

template <class T> DEVICE void attend(const Attention& g) {
  typedef typename Wide<T>::type W;
  extern __shared__ double attention_memory[];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  i64 tiles = (g.seq_q + ROWS * warps - 1) / (ROWS * warps);
  i64 group = blockIdx.x / tiles, row = (blockIdx.x % tiles * warps + warp) * ROWS;
  i64 batch = group / g.heads, head = group % g.heads;
  Span span(g, batch);
  if (row >= span.rows) return;
  Keys<T> keys(g, span, batch, head / (g.heads / g.kv_heads));
  const T* q = (const T*)g.q + batch * g.of_q.batch + head * g.of_q.head + span.first_q * g.of_q.row;
  T* o = (T*)g.o + batch * g.of_o.batch + head * g.of_o.head + span.first_q * g.of_o.row;
  const T* bias = g.bias ? (const T*)g.bias + batch * g.of_bias.batch + head * g.of_bias.head : 0;

  Row<W>* query = (Row<W>*)attention_memory + warp * (g.dim + KEYS + g.value_dim);
  Row<W>* weights = query + g.dim;
  Row<W>* sums = weights + KEYS;
  for (i64 x = lane; x < g.dim; x += 32)
    for (int r = 0; r < ROWS; ++r)
      query[x].v[r] = row + r < span.seq_q ? widen(q[(row + r) * g.of_q.row + x]) * (W)g.scale : W(0);
  for (i64 x = lane; x < g.value_dim; x += 32) sums[x] = Row<W>{};
  __syncwarp();

  i64 first = g.causal == ALL ? span.seq_kv : g.causal == TOP_LEFT ? 1 : 1 + span.seq_kv - span.seq_q;
  i64 begin[ROWS], end[ROWS], low = span.seq_kv, high = 0;
  W most[ROWS], total[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    most[r] = nothing<W>(), total[r] = 0;
    begin[r] = g.window ? max((i64)0, first + row + r - g.window) : 0;
    end[r] = row + r < span.seq_q ? max((i64)0, min(span.seq_kv, first + row + r)) : 0;
    if (begin[r] < end[r]) low = min(low, begin[r]), high = max(high, end[r]);
  }
  for (i64 block = low; block < high; block += KEYS) {
    i64 mine = block + lane;
    int count = (int)min((i64)KEYS, high - block);
    W score[ROWS] = {};
    if (mine < high) {
      const T* key = keys.key(mine);
#pragma unroll 4
      for (i64 x = 0; x < g.dim; ++x) {
        W element = widen(key[x]);
        Row<W> each = query[x];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) score[r] += each.v[r] * element;
      }
    }
    bool is_whole = true;
    W fade[ROWS];
    Row<W> weight;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      bool is_seen = mine >= begin[r] && mine < end[r];
      is_whole &= block >= begin[r] && block + count <= end[r];
      if (is_seen && bias) score[r] += widen(bias[(row + r) * g.of_bias.row + mine]);
      W now = larger(most[r], warp_most(is_seen ? score[r] : nothing<W>()));
      bool is_any = now != nothing<W>();
      fade[r] = is_any ? exp(most[r] - now) : W(1);
      weight.v[r] = is_any && is_seen ? exp(score[r] - now) : W(0);
      total[r] = total[r] * fade[r] + warp_sum(weight.v[r]);
      most[r] = now;
    }
    weights[lane] = weight;
    __syncwarp();
    for (i64 x = lane; x < g.value_dim; x += 32) {
      Row<W> sum = sums[x];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sum.v[r] *= fade[r];
      for (int j = 0; j < count; ++j) {
        W element = widen(keys.value(block + j)[x]);
        Row<W> each = weights[j];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          if (is_whole || (block + j >= begin[r] && block + j < end[r])) sum.v[r] += each.v[r] * element;
      }
      sums[x] = sum;
    }
    __syncwarp();
  }
  for (i64 x = lane; x < g.value_dim; x += 32)
    for (int r = 0; r < ROWS; ++r)
      if (row + r < span.rows) o[(row + r) * g.of_o.row + x] = narrow<T>(most[r] != nothing<W>() ? sums[x].v[r] / total[r] : W(0));
  if (g.stats && lane == 0)
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (row + r < span.rows) ((W*)g.stats)[group * g.seq_q + row + r] = most[r] != nothing<W>() ? most[r] + log(total[r]) : nothing<W>();
}

// What cuDNN wants to know of sequences that lie one behind the other: how long they are, and at which elements they begin.
DEVICE void ragged(const i32* q, const i32* kv, i32* lengths_q, i32* lengths_kv, i32* begins_q, i32* begins_kv, i64 count, i64 width_q, i64 width_kv,
                   i64 tokens_q, i64 tokens_kv, i64 longest_q, i64 longest_kv) {
  for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i <= count; i += gridDim.x * (i64)blockDim.x) {
    const i64 at_q = within(q[i], tokens_q), at_kv = within(kv[i], tokens_kv);
    begins_q[i] = (i32)(at_q * width_q), begins_kv[i] = (i32)(at_kv * width_kv);
    if (i == count) continue;
    lengths_q[i] = (i32)within(within(q[i + 1], tokens_q) - at_q, longest_q);
    lengths_kv[i] = (i32)within(within(kv[i + 1], tokens_kv) - at_kv, longest_kv);
  }
}

// Lengths and tables that are in range, for cuDNN. Where no lengths are given, all are the most.
DEVICE void numbers(const i32* q, i32* to_q, const i32* kv, i32* to_kv, const i32* table, i32* to_table, i64 batch, i64 entries, i64 most_q, i64 most_kv,
                    i64 last_page) {
  const i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
  if (i < batch) to_q[i] = (i32)(q ? within(q[i], most_q) : most_q), to_kv[i] = (i32)(kv ? within(kv[i], most_kv) : most_kv);
  if (i < entries) to_table[i] = (i32)within(table[i], last_page);
}

#define ATTENTION(CODE)                                                                                                                       \
  extern "C" __global__ void attention_any_##CODE(Attention g) { attend<CODE>(g); }                                                          \
  extern "C" __global__ void attention_ragged_##CODE(                                                                                         \
      const i32* q, const i32* kv, i32* lengths_q, i32* lengths_kv, i32* begins_q, i32* begins_kv, i64 count, i64 width_q, i64 width_kv,      \
      i64 tokens_q, i64 tokens_kv, i64 longest_q, i64 longest_kv) {                                                                           \
    ragged(q, kv, lengths_q, lengths_kv, begins_q, begins_kv, count, width_q, width_kv, tokens_q, tokens_kv, longest_q, longest_kv);          \
  }                                                                                                                                           \
  extern "C" __global__ void attention_numbers_##CODE(const i32* q, i32* to_q, const i32* kv, i32* to_kv, const i32* table, i32* to_table,    \
                                                      i64 batch, i64 entries, i64 most_q, i64 most_kv, i64 last_page) {                       \
    numbers(q, to_q, kv, to_kv, table, to_table, batch, entries, most_q, most_kv, last_page);                                                 \
  }
