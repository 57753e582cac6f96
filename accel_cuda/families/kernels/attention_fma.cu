// Attention of f32 and f64 in their own precision, on the ordinary units. 16 threads share TALL rows: each makes TALL queries by WIDE keys of the
// scores, and TALL queries by D / 16 columns of the sums. Weights go from the one division to the other through shared memory, within a half warp.

#if __CUDA_ARCH__ >= 800
// Elements at the end of each row of a tile in shared memory, so that neighbouring rows start in different banks.
template <class W> struct Gap { static constexpr int value = 16 / sizeof(W); };

template <class W, int D, int STRIDE, int ROWS, int THREADS>
DEVICE void fetch_rows(W* tile, const W* from, i64 row0, i64 rows, int dim, int width) {
  constexpr int PITCH = STRIDE * sizeof(W);
  fetch_tile<W, ROWS, D * (int)sizeof(W) / 16, THREADS, PITCH>(
      (byte*)tile, from, row0, rows, dim, width, [](int row, int chunk) { return row * PITCH + chunk * 16; });
}

// sums += weights * values of one tile. HIDES: some row does not see some key, whose value may be infinite or NaN and must not get in.
template <bool HIDES, class W, int D, int TALL, int LINES, int KEYS, int GAP>
DEVICE void add_values(W (&sums)[TALL][D / 16], const W* weights, const W* values, const int (&seen)[TALL]) {
  constexpr int COUNT = 16 / sizeof(W), EACH = D / 16 < COUNT ? D / 16 : COUNT;
  const int tx = threadIdx.x % 16;
#pragma unroll 1
  for (int key = 0; key < KEYS; key += COUNT) {
    Pack<W, COUNT> weight[TALL];
#pragma unroll
    for (int r = 0; r < TALL; ++r) weight[r] = *(const Pack<W, COUNT>*)(weights + r * LINES * (KEYS + GAP) + key);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      Pack<W, EACH> value[D / 16 / EACH];
#pragma unroll
      for (int c = 0; c < D / 16 / EACH; ++c) value[c] = *(const Pack<W, EACH>*)(values + (key + j) * D + c * 16 * EACH + tx * EACH);
#pragma unroll
      for (int r = 0; r < TALL; ++r)
        if (!HIDES || key + j < seen[r])
#pragma unroll
          for (int c = 0; c < D / 16; ++c) sums[r][c] += weight[r].v[j] * value[c / EACH].v[c % EACH];
    }
  }
}

template <class W, int D, int TALL, int KEYS, int LINES>
DEVICE void attend_tiled(const W* __restrict__ q, const W* __restrict__ k, const W* __restrict__ v, W* __restrict__ o, void* workspace, i64 groups,
                         const Sizes& g, double scale, i64 splits, i64 tiles_each) {
  constexpr int THREADS = 16 * LINES, ROWS = TALL * LINES, WIDE = KEYS / 16, COUNT = 16 / sizeof(W), STRIDE = D + Gap<W>::value, GAP = 64 / sizeof(W);
  constexpr int EACH = D / 16 < COUNT ? D / 16 : COUNT;
  extern __shared__ __align__(16) byte storage[];
  W *queries = (W*)storage, *keys = queries + ROWS * STRIDE, *values = keys + KEYS * STRIDE, *weights = values + KEYS * D;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16, dim = (int)g.dim, width = piece<W>(q, k, v, g.dim);
  // The last queries of a head see most: they start first.
  const i64 blocks = (g.seq_q + ROWS - 1) / ROWS, head = blockIdx.x / blocks, row0 = (blocks - 1 - blockIdx.x % blocks) * ROWS;
  const i64 seen_first = seen_by(g, row0), seen_last = seen_by(g, min(row0 + ROWS, g.seq_q) - 1);
  const i64 begin = blockIdx.y * tiles_each, end = min(begin + tiles_each, (seen_last + KEYS - 1) / KEYS);
  q += head * g.seq_q * dim, k += head * g.seq_kv * dim, v += head * g.seq_kv * dim;

  fetch_rows<W, D, STRIDE, ROWS, THREADS>(queries, q, row0, g.seq_q, dim, width);
  if (begin < end) fetch_rows<W, D, STRIDE, KEYS, THREADS>(keys, k, begin * KEYS, g.seq_kv, dim, width);
  commit();
  arrived();
  __syncthreads();
  const W factor = (W)(scale * LOG2E);
  for (int at = threadIdx.x; at < ROWS * D; at += THREADS) queries[at / D * STRIDE + at % D] *= factor;

  W sums[TALL][D / 16] = {}, most[TALL], total[TALL] = {};
  int seen[TALL];  // how many keys each row sees, counted from the tile at hand
#pragma unroll
  for (int r = 0; r < TALL; ++r) most[r] = -infinity<W>(), seen[r] = 0;
  W* mine = weights + ty * (KEYS + GAP);

  for (i64 tile = begin; tile < end; ++tile) {
    const i64 key0 = tile * KEYS;
    const bool masked = key0 + KEYS > seen_first;
    arrived();
    __syncthreads();
    fetch_rows<W, D, D, KEYS, THREADS>(values, v, key0, g.seq_kv, dim, width);
    commit();

    W score[TALL][WIDE] = {};
#pragma unroll 2
    for (int d = 0; d < D; d += COUNT) {
      Pack<W, COUNT> left[TALL], right[WIDE];
#pragma unroll
      for (int r = 0; r < TALL; ++r) left[r] = *(const Pack<W, COUNT>*)(queries + (ty + LINES * r) * STRIDE + d);
#pragma unroll
      for (int c = 0; c < WIDE; ++c) right[c] = *(const Pack<W, COUNT>*)(keys + (tx + 16 * c) * STRIDE + d);
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int r = 0; r < TALL; ++r)
#pragma unroll
          for (int c = 0; c < WIDE; ++c) score[r][c] += left[r].v[i] * right[c].v[i];
    }
    arrived();
    __syncthreads();
    if (tile + 1 < end) fetch_rows<W, D, STRIDE, KEYS, THREADS>(keys, k, key0 + KEYS, g.seq_kv, dim, width);
    commit();

#pragma unroll
    for (int r = 0; r < TALL; ++r) {
      if (masked) {
        seen[r] = (int)max((i64)-1, min((i64)KEYS, seen_by(g, row0 + ty + LINES * r) - key0));
#pragma unroll
        for (int c = 0; c < WIDE; ++c)
          if (tx + 16 * c >= seen[r]) score[r][c] = -infinity<W>();
      }
      W high = most[r];
#pragma unroll
      for (int c = 0; c < WIDE; ++c) high = most_of(high, score[r][c]);
#pragma unroll
      for (int offset = 8; offset; offset /= 2) high = most_of(high, from_lane(high, offset));
      const W base = level(high), shrink = power2(most[r] - base);
      most[r] = high, total[r] *= shrink;
#pragma unroll
      for (int c = 0; c < WIDE; ++c) {
        const W weight = power2(score[r][c] - base);
        total[r] += weight;
        mine[r * LINES * (KEYS + GAP) + tx + 16 * c] = weight;
      }
#pragma unroll
      for (int c = 0; c < D / 16; ++c) sums[r][c] *= shrink;
    }
    __syncwarp();
    if (masked) add_values<true, W, D, TALL, LINES, KEYS, GAP>(sums, mine, values, seen);
    else add_values<false, W, D, TALL, LINES, KEYS, GAP>(sums, mine, values, seen);
  }
  arrived();

  const i64 rows = groups * g.seq_q;
  Parts<W> parts{(W*)workspace, rows, g.dim, (int)splits};
#pragma unroll
  for (int r = 0; r < TALL; ++r) {
    W sum = total[r];
#pragma unroll
    for (int offset = 8; offset; offset /= 2) sum += from_lane(sum, offset);
    const i64 in_head = row0 + ty + LINES * r, row = head * g.seq_q + in_head;
    if (in_head >= g.seq_q) continue;
    const bool any = seen_by(g, in_head) > 0;
    if (splits > 1 && tx == 0) parts.scales(blockIdx.y, row)[0] = most[r], parts.scales(blockIdx.y, row)[1] = sum;
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      const int column = c / EACH * 16 * EACH + tx * EACH + c % EACH;
      if (column >= dim) continue;
      if (splits > 1) parts.sums(blockIdx.y, row)[column] = sums[r][c];
      else o[row * dim + column] = any ? sums[r][c] / sum : W(0);
    }
  }
}

#define TILED(T, D, TALL, KEYS, LINES, BLOCKS)                                                                                              \
  extern "C" __global__ void __launch_bounds__(16 * LINES, BLOCKS)                                                                          \
      attention_tiled_##T##_##D(const T* q, const T* k, const T* v, T* o, void* workspace, i64 groups, i64 seq_q, i64 seq_kv, i64 dim,      \
                                i64 first, double scale, i64 splits, i64 tiles_each) {                                                      \
    attend_tiled<T, D, TALL, KEYS, LINES>(q, k, v, o, workspace, groups, Sizes{seq_q, seq_kv, dim, first}, scale, splits, tiles_each);      \
  }
#else
#define TILED(T, D, TALL, KEYS, LINES, BLOCKS)
#endif
