// Gradients of attention: what cuDNN does not compute. A warp makes the row of one query, or the two of one key: a lane has the weight of every 32nd row of
// the other side, and then all lanes add up the rows times their weights, each lane some of the columns.
//
// A pair of a query and a key that it does not see has weight 0, and its rows are left out: they may be no numbers.

enum { ALL = 0, TOP_LEFT = 1, BOTTOM_RIGHT = 2 };

struct Steps { i64 batch, head, row; };  // in elements

struct Backward {
  const void *grad, *q, *k, *v, *made, *stats;  // grad, made and stats are contiguous, as all results are
  void *of_q, *of_k, *of_v;
  i64 batch, heads, kv_heads, seq_q, seq_kv, dim, value_dim, causal, window;
  Steps q_steps, k_steps, v_steps;
  double scale;
};

template <class W, class T> DEVICE W dot(const T* a, const T* b, i64 count) {
  W sum = W(0);
#pragma unroll 4
  for (i64 x = 0; x < count; ++x) sum += (W)widen(a[x]) * (W)widen(b[x]);
  return sum;
}

// The keys that a query sees.
struct Seen {
  i64 begin, end;
  DEVICE Seen(const Backward& g, i64 query) {
    end = g.causal == ALL ? g.seq_kv : query + 1 + (g.causal == BOTTOM_RIGHT ? g.seq_kv - g.seq_q : 0);
    begin = g.window ? max(0ll, end - g.window) : 0;
    end = min(end, g.seq_kv);
  }
  DEVICE bool has(i64 key) const { return key >= begin && key < end; }
};

// What a query and a key give: the weight, and the gradient of the score times the scale.
template <class W> struct Pair { W weight, slope; };
template <class T> struct Rows {
  typedef typename Wide<T>::type W;
  const T *q, *k, *v, *grad, *made;
  const W* stats;
  DEVICE Rows(const Backward& g, i64 batch, i64 head, i64 kv_head)
      : q((const T*)g.q + batch * g.q_steps.batch + head * g.q_steps.head),
        k((const T*)g.k + batch * g.k_steps.batch + kv_head * g.k_steps.head),
        v((const T*)g.v + batch * g.v_steps.batch + kv_head * g.v_steps.head),
        grad((const T*)g.grad + (batch * g.heads + head) * g.seq_q * g.value_dim),
        made((const T*)g.made + (batch * g.heads + head) * g.seq_q * g.value_dim),
        stats((const W*)g.stats + (batch * g.heads + head) * g.seq_q) {}
  DEVICE W spent(const Backward& g, i64 query) const { return dot<W>(grad + query * g.value_dim, made + query * g.value_dim, g.value_dim); }
  DEVICE Pair<W> pair(const Backward& g, i64 query, i64 key, W spent) const {
    const W score = dot<W>(q + query * g.q_steps.row, k + key * g.k_steps.row, g.dim) * (W)g.scale;
    const W weight = exp(score - stats[query]);
    return {weight, weight * (dot<W>(grad + query * g.value_dim, v + key * g.v_steps.row, g.value_dim) - spent) * (W)g.scale};
  }
};

template <class T> DEVICE void of_queries(const Backward& g) {
  typedef typename Wide<T>::type W;
  extern __shared__ double backward_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + warp;
  if (row >= g.batch * g.heads * g.seq_q) return;
  const i64 query = row % g.seq_q, group = row / g.seq_q, batch = group / g.heads, head = group % g.heads;
  const Rows<T> rows(g, batch, head, head / (g.heads / g.kv_heads));
  W* sums = (W*)backward_memory + warp * (g.dim + 32);
  W* slopes = sums + g.dim;
  for (i64 x = lane; x < g.dim; x += 32) sums[x] = W(0);
  const Seen seen(g, query);
  const W spent = rows.spent(g, query);
  for (i64 block = seen.begin; block < seen.end; block += 32) {
    const int count = (int)min(32ll, seen.end - block);
    __syncwarp();
    slopes[lane] = lane < count ? rows.pair(g, query, block + lane, spent).slope : W(0);
    __syncwarp();
    for (i64 x = lane; x < g.dim; x += 32) {
      W sum = sums[x];
      for (int j = 0; j < count; ++j) sum += slopes[j] * (W)widen(rows.k[(block + j) * g.k_steps.row + x]);
      sums[x] = sum;
    }
  }
  T* to = (T*)g.of_q + row * g.dim;
  for (i64 x = lane; x < g.dim; x += 32) to[x] = narrow<T>(sums[x]);
}

template <class T> DEVICE void of_keys(const Backward& g) {
  typedef typename Wide<T>::type W;
  extern __shared__ double backward_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + warp;
  if (row >= g.batch * g.kv_heads * g.seq_kv) return;
  const i64 key = row % g.seq_kv, group = row / g.seq_kv, batch = group / g.kv_heads, kv_head = group % g.kv_heads, share = g.heads / g.kv_heads;
  W* sums = (W*)backward_memory + warp * (g.dim + g.value_dim + 64);
  W *values = sums + g.dim, *slopes = values + g.value_dim, *weights = slopes + 32;
  for (i64 x = lane; x < g.dim + g.value_dim; x += 32) sums[x] = W(0);
  for (i64 head = kv_head * share; head < (kv_head + 1) * share; ++head) {
    const Rows<T> rows(g, batch, head, kv_head);
    for (i64 block = 0; block < g.seq_q; block += 32) {
      const i64 query = block + lane;
      const bool is_seen = query < g.seq_q && Seen(g, query).has(key);
      const u32 which = __ballot_sync(0xffffffffu, is_seen);
      if (!which) continue;
      Pair<W> pair = {W(0), W(0)};
      if (is_seen) pair = rows.pair(g, query, key, rows.spent(g, query));
      __syncwarp();
      slopes[lane] = pair.slope, weights[lane] = pair.weight;
      __syncwarp();
      for (i64 x = lane; x < g.dim; x += 32) {
        W sum = sums[x];
        for (int j = 0; j < 32; ++j)
          if (which >> j & 1) sum += slopes[j] * (W)widen(rows.q[(block + j) * g.q_steps.row + x]);
        sums[x] = sum;
      }
      for (i64 x = lane; x < g.value_dim; x += 32) {
        W sum = values[x];
        for (int j = 0; j < 32; ++j)
          if (which >> j & 1) sum += weights[j] * (W)widen(rows.grad[(block + j) * g.value_dim + x]);
        values[x] = sum;
      }
    }
  }
  T *keys = (T*)g.of_k + row * g.dim, *to = (T*)g.of_v + row * g.value_dim;
  for (i64 x = lane; x < g.dim; x += 32) keys[x] = narrow<T>(sums[x]);
  for (i64 x = lane; x < g.value_dim; x += 32) to[x] = narrow<T>(values[x]);
}

#define BACKWARD(T)                                                                          \
  extern "C" __global__ void __launch_bounds__(128) backward_queries_##T(const __grid_constant__ Backward g) { of_queries<T>(g); } \
  extern "C" __global__ void __launch_bounds__(128) backward_keys_##T(const __grid_constant__ Backward g) { of_keys<T>(g); }
