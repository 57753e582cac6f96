// Attention of few queries, where reading the keys and values is all the time there is; and of any shape, for what the tiled kernels do not take.

// One query of one head by one share of its keys a block. As many lanes as a key has pieces of 16 bytes, at most 32, share a key.
template <class T, int D, int WARPS>
DEVICE void attend_row(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ o, void* workspace, i64 rows,
                       const Sizes& g, double scale, i64 splits, i64 keys_each) {
  typedef typename Exact<T>::type W;
  constexpr int COUNT = 16 / sizeof(T), PIECES = D / COUNT, SHARING = PIECES < 32 ? PIECES : 32, EACH = PIECES / SHARING;
  constexpr int AT_ONCE = EACH > 1 ? 4 / EACH : 4, KEYS = 32 / SHARING * WARPS;
  __shared__ W sums[WARPS][D], scales[WARPS][2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.x / SHARING, piece0 = lane % SHARING * COUNT, dim = (int)g.dim;
  const bool whole = piece<T>(q, k, v, g.dim) == 16;
  const i64 row = blockIdx.x, head = row / g.seq_q, seen = seen_by(g, row % g.seq_q);
  const i64 begin = blockIdx.y * keys_each, end = min(begin + keys_each, seen);
  k += head * g.seq_kv * dim, v += head * g.seq_kv * dim;
  W query[EACH][COUNT], sum[EACH][COUNT] = {}, most = -infinity<W>(), total = W(0);
#pragma unroll
  for (int e = 0; e < EACH; ++e)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int column = piece0 + e * SHARING * COUNT + i;
      query[e][i] = column < dim ? (W)widen(q[row * dim + column]) * (W)(scale * LOG2E) : W(0);
    }
  auto load = [&](const T* from, i64 key, int e) {
    Pack<T, COUNT> values = {};
    const int column = piece0 + e * SHARING * COUNT;
    if (key < end) {
      if (whole) {
        if (column < dim) values = *(const Pack<T, COUNT>*)(from + key * dim + column);
      } else
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          if (column + i < dim) values.v[i] = from[key * dim + column + i];
    }
    return values;
  };
  for (i64 key0 = begin; key0 < end; key0 += KEYS * AT_ONCE) {
    Pack<T, COUNT> keys[AT_ONCE][EACH], values[AT_ONCE][EACH];
    W score[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u)
#pragma unroll
      for (int e = 0; e < EACH; ++e) keys[u][e] = load(k, key0 + u * KEYS + group, e);
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u)
#pragma unroll
      for (int e = 0; e < EACH; ++e) values[u][e] = load(v, key0 + u * KEYS + group, e);
    W high = most;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      score[u] = W(0);
#pragma unroll
      for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) score[u] += query[e][i] * (W)widen(keys[u][e].v[i]);
#pragma unroll
      for (int offset = SHARING / 2; offset; offset /= 2) score[u] += from_lane(score[u], offset);
      if (key0 + u * KEYS + group >= end) score[u] = -infinity<W>();
      high = most_of(high, score[u]);
    }
    const W base = level(high), shrink = power2(most - base);
    most = high, total *= shrink;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sum[e][i] *= shrink;
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const W weight = power2(score[u] - base);
      total += weight;
#pragma unroll
      for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum[e][i] += weight * (W)widen(values[u][e].v[i]);
    }
  }
  // The groups of a warp, then the warps.
  W high = most;
#pragma unroll
  for (int offset = 16; offset >= SHARING; offset /= 2) high = most_of(high, from_lane(high, offset));
  W shrink = power2(most - level(high));
  most = high, total *= shrink;
#pragma unroll
  for (int offset = 16; offset >= SHARING; offset /= 2) total += from_lane(total, offset);
#pragma unroll
  for (int e = 0; e < EACH; ++e)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      W each = sum[e][i] * shrink;
#pragma unroll
      for (int offset = 16; offset >= SHARING; offset /= 2) each += from_lane(each, offset);
      if (lane < SHARING) sums[warp][piece0 + e * SHARING * COUNT + i] = each;
    }
  if (lane == 0) scales[warp][0] = most, scales[warp][1] = total;
  __syncthreads();
  high = -infinity<W>(), total = W(0);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) high = most_of(high, scales[w][0]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += scales[w][1] * power2(scales[w][0] - level(high));
  Parts<W> parts{(W*)workspace, rows, g.dim, (int)splits};
  if (splits > 1 && threadIdx.x == 0) parts.scales(blockIdx.y, row)[0] = high, parts.scales(blockIdx.y, row)[1] = total;
  for (int column = threadIdx.x; column < dim; column += 32 * WARPS) {
    W each = W(0);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) each += sums[w][column] * power2(scales[w][0] - level(high));
    if (splits > 1) parts.sums(blockIdx.y, row)[column] = each;
    else o[row * dim + column] = narrow<T>(seen ? each / total : W(0));
  }
}

// A warp takes ROWS queries of one head, its lanes 32 keys at a time.
constexpr int ROWS = 4;

template <class T>
DEVICE void attend_simply(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ o, i64 groups, const Sizes& g,
                          double scale) {
  typedef typename Exact<T>::type W;
  extern __shared__ __align__(128) byte storage[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 dim = g.dim;
  W* query = (W*)storage + (i64)warp * (2 * ROWS * dim + ROWS * 32);
  W *result = query + ROWS * dim, *weights = result + ROWS * dim;
  i64 tiles = (g.seq_q + ROWS - 1) / ROWS, tile = (i64)blockIdx.x * (blockDim.x / 32) + warp;
  if (tile >= tiles * groups) return;  // whole warps: no barrier of the block follows
  i64 head = tile / tiles, row0 = tile % tiles * ROWS;
  int rows = (int)min((i64)ROWS, g.seq_q - row0);
  q += (head * g.seq_q + row0) * dim, o += (head * g.seq_q + row0) * dim, k += head * g.seq_kv * dim, v += head * g.seq_kv * dim;
  for (i64 d = lane; d < ROWS * dim; d += 32) {
    query[d] = d < rows * dim ? (W)widen(q[d]) * (W)(scale * LOG2E) : W(0);
    result[d] = W(0);
  }
  W most[ROWS], total[ROWS];
  i64 seen[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    most[r] = -infinity<W>(), total[r] = W(0);
    seen[r] = r < rows ? seen_by(g, row0 + r) : 0;
  }
  __syncwarp();
  for (i64 key0 = 0; key0 < seen[rows - 1]; key0 += 32) {
    W score[ROWS] = {};
    i64 key = key0 + lane;
    if (key < g.seq_kv)
      for (i64 d = 0; d < dim; ++d) {
        W each = (W)widen(k[key * dim + d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) score[r] += query[r * dim + d] * each;
      }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (key0 >= seen[r]) { weights[r * 32 + lane] = W(0); continue; }
      bool visible = key < seen[r];
      W high = visible ? score[r] : -infinity<W>();
      for (int offset = 16; offset; offset /= 2) high = most_of(high, from_lane(high, offset));
      high = most_of(high, most[r]);
      W weight = visible ? power2(score[r] - level(high)) : W(0), sum = weight, shrink = power2(most[r] - level(high));
      for (int offset = 16; offset; offset /= 2) sum += from_lane(sum, offset);
      total[r] = total[r] * shrink + sum, most[r] = high;
      weights[r * 32 + lane] = weight;
      for (i64 d = lane; d < dim; d += 32) result[r * dim + d] *= shrink;
    }
    __syncwarp();
    for (i64 d = lane; d < dim; d += 32) {
      W sum[ROWS];
      for (int r = 0; r < ROWS; ++r) sum[r] = result[r * dim + d];
      for (int j = 0; j < 32 && key0 + j < g.seq_kv; ++j) {
        W each = (W)widen(v[(key0 + j) * dim + d]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          if (key0 + j < seen[r]) sum[r] += weights[r * 32 + j] * each;  // a NaN that is not seen must not get in
      }
      for (int r = 0; r < ROWS; ++r) result[r * dim + d] = sum[r];
    }
    __syncwarp();
  }
  for (i64 d = lane; d < rows * dim; d += 32) {
    int r = (int)(d / dim);
    W sum = r == 0 ? total[0] : r == 1 ? total[1] : r == 2 ? total[2] : total[3];
    i64 count = r == 0 ? seen[0] : r == 1 ? seen[1] : r == 2 ? seen[2] : seen[3];
    o[d] = narrow<T>(count ? result[d] / sum : W(0));
  }
}

#define ROWWISE(T, D)                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(128)                                                                                         \
      rowwise_attention_##T##_##D(const T* q, const T* k, const T* v, T* o, void* workspace, i64 rows, i64 seq_q, i64 seq_kv, i64 dim,          \
                              i64 first, double scale, i64 splits, i64 keys_each) {                                                         \
    attend_row<T, D, 4>(q, k, v, o, workspace, rows, Sizes{seq_q, seq_kv, dim, first}, scale, splits, keys_each);                           \
  }

#define ANYWISE(T)                                                                                                                          \
  extern "C" __global__ void attention_simple_##T(const T* q, const T* k, const T* v, T* o, void*, i64 groups, i64 seq_q, i64 seq_kv,       \
                                                  i64 dim, i64 first, double scale) {                                                       \
    attend_simply(q, k, v, o, groups, Sizes{seq_q, seq_kv, dim, first}, scale);                                                             \
  }                                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) finish_attention_##T(const void* workspace, T* o, i64 rows, i64 seq_q, i64 seq_kv,      \
                                                                         i64 dim, i64 first, i64 splits) {                                  \
    finish(workspace, o, rows, Sizes{seq_q, seq_kv, dim, first}, splits);                                                                   \
  }
