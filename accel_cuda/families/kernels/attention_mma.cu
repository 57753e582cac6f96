// Attention of f16 and bf16 by tensor cores, sums in f32, weights rounded to the elements' type before they meet the values.
// A warp makes 16 * TALL queries by KEYS keys at a time. While a block multiplies by one tile of keys, the values of that tile arrive, and the next
// keys while it multiplies by the values.

#if __CUDA_ARCH__ >= 800
DEVICE void multiply(f16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply(bf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE u32 pack(f16, float low, float high) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
DEVICE u32 pack(bf16, float low, float high) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }
// Bits of the exponent: an element with all of them set is infinite or no number.
DEVICE u32 exponent(f16) { return 0x7c00; }
DEVICE u32 exponent(bf16) { return 0x7f80; }

DEVICE void matrices(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void matrices_turned(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Byte offset of 16 bytes of a tile of rows of D elements: which of a row's pieces lies where depends on the row, so that 8 rows' same piece is in 8
// different groups of banks.
template <int D> DEVICE int place(int row, int chunk) {
  if constexpr (D == 32) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  else return row * (2 * D) + ((chunk ^ (row & 7)) << 4);
}

template <class T, int D, int ROWS, int THREADS>
DEVICE void fetch_rows(byte* tile, const T* from, i64 row0, i64 rows, int dim, int width) {
  fetch_tile<T, ROWS, D / 8, THREADS, 2 * D>(tile, from, row0, rows, dim, width, [](int row, int chunk) { return place<D>(row, chunk); });
}

// Take the infinities and NaNs out of a tile: products with a weight of 0 would bring them in. Returns whether there were any, to all threads.
template <class T, int BYTES, int THREADS> DEVICE bool clear_nonfinite(byte* tile) {
  const u32 low = exponent(T()), high = low << 16;
  bool found = false;
  for (int at = threadIdx.x * 4; at < BYTES; at += THREADS * 4) {
    u32 pair = *(u32*)(tile + at), keep = ((pair & low) == low ? 0 : 0xffffu) | ((pair & high) == high ? 0 : 0xffff0000u);
    if (keep != 0xffffffffu) *(u32*)(tile + at) = pair & keep, found = true;
  }
  return __syncthreads_or(found);
}

// Write two rows of results, or of parts: what one thread has of rows `mine` and `mine + 8` of a head.
template <class T, int D>
DEVICE void store(const float (&sums)[D / 8][4], const float (&most)[2], const float (&total)[2], T* __restrict__ o, void* workspace, i64 groups,
                  const Sizes& g, i64 head, i64 mine, i64 splits) {
  const int lane = threadIdx.x % 32, dim = (int)g.dim;
  Parts<float> parts{(float*)workspace, groups * g.seq_q, g.dim, (int)splits};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = total[h];
    sum += from_lane(sum, 1);
    sum += from_lane(sum, 2);
    const i64 in_head = mine + 8 * h, row = head * g.seq_q + in_head;
    if (in_head >= g.seq_q) continue;
    if (splits > 1) {
      if (lane % 4 == 0) parts.scales(blockIdx.y, row)[0] = most[h], parts.scales(blockIdx.y, row)[1] = sum;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + lane % 4 * 2 + i;
          if (column < dim) parts.sums(blockIdx.y, row)[column] = sums[n][2 * h + i];
        }
      continue;
    }
    const bool any = seen_by(g, in_head) > 0;
    const float share = 1 / sum;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float left = any ? sums[n][2 * h] * share : 0, right = any ? sums[n][2 * h + 1] * share : 0;
      T* to = o + row * dim + column;
      if (column + 1 < dim && ((u64)to & 3) == 0) *(u32*)to = pack(T(), left, right);
      else {
        if (column < dim) to[0] = narrow<T>(left);
        if (column + 1 < dim) to[1] = narrow<T>(right);
      }
    }
  }
}

template <class T, int D, int TALL, int KEYS, int WARPS>
DEVICE void attend_tiled(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ o, void* workspace, i64 groups,
                         const Sizes& g, double scale, i64 splits, i64 tiles_each) {
  constexpr int THREADS = 32 * WARPS, ROWS = 16 * TALL * WARPS, QUERY = ROWS * D * 2, TILE = KEYS * D * 2;
  constexpr bool KEEP = D * TALL <= 128;  // the queries' fragments stay in registers
  extern __shared__ __align__(128) byte storage[];
  byte *queries = storage, *keys = storage + QUERY, *values = keys + TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = (int)g.dim;
  const int width = piece<T>(q, k, v, g.dim);
  // The last queries of a head see most: they start first.
  const i64 blocks = (g.seq_q + ROWS - 1) / ROWS, head = blockIdx.x / blocks, row0 = (blocks - 1 - blockIdx.x % blocks) * ROWS;
  const i64 seen_first = seen_by(g, row0), seen_last = seen_by(g, min(row0 + ROWS, g.seq_q) - 1);
  const i64 begin = blockIdx.y * tiles_each, end = min(begin + tiles_each, (seen_last + KEYS - 1) / KEYS);
  q += head * g.seq_q * dim, k += head * g.seq_kv * dim, v += head * g.seq_kv * dim;

  fetch_rows<T, D, ROWS, THREADS>(queries, q, row0, g.seq_q, dim, width);
  if (begin < end) fetch_rows<T, D, KEYS, THREADS>(keys, k, begin * KEYS, g.seq_kv, dim, width);
  commit();
  if (scale < 0) {  // what follows takes the largest product for the largest score
    arrived();
    __syncthreads();
    for (int at = threadIdx.x * 4; at < QUERY; at += THREADS * 4) *(u32*)(queries + at) ^= 0x80008000u;
  }
  // Never 0: -infinity, which stands for a key that is not seen, times 0 would be a NaN.
  const float factor = fmaxf((float)(fabs(scale) * LOG2E), 1.17549435e-38f);

  float sums[TALL][D / 8][4] = {}, most[TALL][2], total[TALL][2] = {};
  int seen[TALL][2];  // how many keys each row sees, counted from the tile at hand
  const i64 mine = row0 + warp * 16 * TALL + lane / 4;
#pragma unroll
  for (int m = 0; m < TALL; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) most[m][h] = -infinity<float>();
  const u32 query_base = (u32)__cvta_generic_to_shared(queries), key_base = (u32)__cvta_generic_to_shared(keys), value_base = (u32)__cvta_generic_to_shared(values);
  const int query_row = warp * 16 * TALL + lane % 16, query_chunk = lane / 16;
  const int key_row = (lane & 7) + (lane >> 4 << 3), key_chunk = lane >> 3 & 1;
  u32 kept[KEEP ? D / 16 : 1][TALL][4];
  if constexpr (KEEP) {
    arrived();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
      for (int m = 0; m < TALL; ++m) matrices(kept[step][m], query_base + place<D>(query_row + 16 * m, 2 * step + query_chunk));
  }

  for (i64 tile = begin; tile < end; ++tile) {
    const i64 key0 = tile * KEYS;
    const bool masked = key0 + KEYS > seen_first;
    arrived();
    __syncthreads();
    fetch_rows<T, D, KEYS, THREADS>(values, v, key0, g.seq_kv, dim, width);
    commit();

    float score[TALL][KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      u32 a[TALL][4];
      if constexpr (!KEEP) {
#pragma unroll
        for (int m = 0; m < TALL; ++m) matrices(a[m], query_base + place<D>(query_row + 16 * m, 2 * step + query_chunk));
      }
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        u32 b[4];
        matrices(b, key_base + place<D>(16 * n + key_row, 2 * step + key_chunk));
#pragma unroll
        for (int m = 0; m < TALL; ++m) {
          const u32(&left)[4] = KEEP ? kept[KEEP ? step : 0][m] : a[m];
          multiply(T(), score[m][2 * n], left, b[0], b[1]);
          multiply(T(), score[m][2 * n + 1], left, b[2], b[3]);
        }
      }
    }
    arrived();
    __syncthreads();
    if (tile + 1 < end) fetch_rows<T, D, KEYS, THREADS>(keys, k, key0 + KEYS, g.seq_kv, dim, width);
    commit();

    bool nonfinite = false;
    if (masked) {
      nonfinite = clear_nonfinite<T, TILE, THREADS>(values);
#pragma unroll
      for (int m = 0; m < TALL; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          seen[m][h] = (int)max((i64)-1, min((i64)KEYS, seen_by(g, mine + 16 * m + 8 * h) - key0));
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (8 * n + lane % 4 * 2 + i >= seen[m][h]) score[m][n][2 * h + i] = -infinity<float>();
        }
    }
#pragma unroll
    for (int m = 0; m < TALL; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float high = score[m][0][2 * h], other = score[m][0][2 * h + 1];
#pragma unroll
        for (int n = 1; n < KEYS / 8; ++n) high = fmaxf(high, score[m][n][2 * h]), other = fmaxf(other, score[m][n][2 * h + 1]);
        high = fmaxf(high, other);
        high = fmaxf(high, from_lane(high, 1));
        high = fmaxf(high, from_lane(high, 2));
        high = fmaxf(most[m][h], high * factor);
        const float base = level(high), shrink = power2(most[m][h] - base);
        most[m][h] = high;
        float part[4] = {};  // one sum would wait for itself
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) part[2 * (n % 2) + i] += score[m][n][2 * h + i] = power2(fmaf(score[m][n][2 * h + i], factor, -base));
        total[m][h] = total[m][h] * shrink + (part[0] + part[1] + (part[2] + part[3]));
#pragma unroll
        for (int n = 0; n < D / 8; ++n) sums[m][n][2 * h] *= shrink, sums[m][n][2 * h + 1] *= shrink;
      }
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step) {
      u32 a[TALL][4];
#pragma unroll
      for (int m = 0; m < TALL; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = pack(T(), score[m][2 * step + i / 2][i % 2 * 2], score[m][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        u32 b[4];
        matrices_turned(b, value_base + place<D>(16 * step + lane % 16, 2 * n + lane / 16));
#pragma unroll
        for (int m = 0; m < TALL; ++m) {
          multiply(T(), sums[m][2 * n], a[m], b[0], b[1]);
          multiply(T(), sums[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    if (nonfinite) {  // who sees an infinity or a NaN is given it
      const int count = (int)min((i64)KEYS, g.seq_kv - key0);
      for (int key = 0; key < count; ++key)
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * n + lane % 4 * 2 + i;
            const T each = v[(key0 + key) * dim + min(column, dim - 1)];
            if (column < dim && (each.bits & exponent(T())) == exponent(T()))
#pragma unroll
              for (int m = 0; m < TALL; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                  if (key < seen[m][h]) sums[m][n][2 * h + i] += widen(each);
          }
    }
  }
  arrived();

#pragma unroll
  for (int m = 0; m < TALL; ++m) store<T, D>(sums[m], most[m], total[m], o, workspace, groups, g, head, mine + 16 * m, splits);
}

#define TILED(T, D, TALL, KEYS, WARPS, BLOCKS)                                                                                              \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                                                          \
      attention_tiled_##T##_##D(const T* q, const T* k, const T* v, T* o, void* workspace, i64 groups, i64 seq_q, i64 seq_kv, i64 dim,      \
                                i64 first, double scale, i64 splits, i64 tiles_each) {                                                      \
    attend_tiled<T, D, TALL, KEYS, WARPS>(q, k, v, o, workspace, groups, Sizes{seq_q, seq_kv, dim, first}, scale, splits, tiles_each);      \
  }
#else
#define TILED(T, D, TALL, KEYS, WARPS, BLOCKS)
#endif
