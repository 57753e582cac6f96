// Attention of f16 and bf16 on compute capability 9.0, whose tensor cores run beside the warps that started them. Sums and weights are as in the
// tiled kernel for the others, and so is who holds which of them. A group of 4 warps makes 64 queries by KEYS keys at a time: while the product of one
// tile's weights and values runs, the weights of the next are made.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Where 64 columns of a tile lie, in rows of 128 bytes whose pieces change places with the row, as `place` puts them.
DEVICE u64 described(u32 address) { return (u64)(address >> 4 & 0x3fff) | (u64)64 << 16 | (u64)64 << 32 | (u64)1 << 62; }

#define SUMS32(c)                                                                                                                             \
  "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]),      \
      "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),  \
      "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]),  \
      "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
#define MULTIPLY64(TYPE)                                                                                                                      \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                             \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"    \
               " {%32,%33,%34,%35}, %36, p, 1, 1, %38; }"                                                                                     \
               : SUMS32(c) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(TURNED))
// c (+)= a * b, of 64 x 16 by 16 x 64 elements. TURNED: the 64 are what lies side by side in memory.
template <int TURNED> DEVICE void multiply64(f16, float (&c)[8][4], const u32 (&a)[4], u64 b, int adds) { MULTIPLY64("f16"); }
template <int TURNED> DEVICE void multiply64(bf16, float (&c)[8][4], const u32 (&a)[4], u64 b, int adds) { MULTIPLY64("bf16"); }

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Nothing that reads or writes the sums is moved across.
template <int N> DEVICE void hold(float (&c)[N][8][4]) {
#pragma unroll
  for (int p = 0; p < N; ++p) asm volatile("" : SUMS32(c[p])::"memory");
}
// What was written to shared memory is what the tensor cores read.
DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int ROWS> DEVICE int panel_place(int row, int chunk) { return chunk / 8 * (ROWS * 128) + place<64>(row, chunk % 8); }

template <class T, int D, int ROWS, int THREADS>
DEVICE void fetch_panels(byte* tile, const T* from, i64 row0, i64 rows, int dim, int width) {
  fetch_tile<T, ROWS, D / 8, THREADS, 128>(tile, from, row0, rows, dim, width, [](int row, int chunk) { return panel_place<ROWS>(row, chunk); });
}

template <class T, int D, int KEYS, int GROUPS>
DEVICE void attend_by_groups(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, T* __restrict__ o, void* workspace, i64 groups,
                             const Sizes& g, double scale, i64 splits, i64 tiles_each) {
  constexpr int THREADS = 128 * GROUPS, ROWS = 64 * GROUPS, QUERY = ROWS * D * 2, TILE = KEYS * D * 2, PANEL = KEYS * 128;
  extern __shared__ __align__(1024) byte storage[];
  byte *queries = storage, *keys = storage + QUERY, *values = keys + 2 * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = (int)g.dim;
  const int width = piece<T>(q, k, v, g.dim);
  // The last queries of a head see most: they start first.
  const i64 blocks = (g.seq_q + ROWS - 1) / ROWS, head = blockIdx.x / blocks, row0 = (blocks - 1 - blockIdx.x % blocks) * ROWS;
  const i64 seen_first = seen_by(g, row0), seen_last = seen_by(g, min(row0 + ROWS, g.seq_q) - 1);
  const i64 begin = blockIdx.y * tiles_each, end = min(begin + tiles_each, (seen_last + KEYS - 1) / KEYS), mine = row0 + warp * 16 + lane / 4;
  q += head * g.seq_q * dim, k += head * g.seq_kv * dim, v += head * g.seq_kv * dim;
  // Never 0: -infinity, which stands for a key that is not seen, times 0 would be a NaN.
  const float factor = fmaxf((float)(fabs(scale) * LOG2E), 1.17549435e-38f);

  float sums[D / 64][8][4] = {}, score[KEYS / 64][8][4], most[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {}, shrink[2];
  u32 query[D / 16][4], weights[KEYS / 16][4];
  const u32 key_base = (u32)__cvta_generic_to_shared(keys), value_base = (u32)__cvta_generic_to_shared(values);

  auto start_scores = [&](i64 tile) {
    const u32 from = key_base + (u32)((tile - begin) & 1) * TILE;
#pragma unroll
    for (int step = 0; step < D / 16; ++step)
#pragma unroll
      for (int n = 0; n < KEYS / 64; ++n)
        multiply64<0>(T(), score[n], query[step], described(from + step / 4 * PANEL + n * 8192 + step % 4 * 32), step > 0);
    end_products();
  };
  auto start_sums = [&](i64 tile) {
    const u32 from = value_base + (u32)((tile - begin) & 1) * TILE;
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
      for (int p = 0; p < D / 64; ++p) multiply64<1>(T(), sums[p], weights[step], described(from + p * PANEL + step * 2048), 1);
    end_products();
  };
  auto weigh = [&](i64 tile) {
    const i64 key0 = tile * KEYS;
    if (key0 + KEYS > seen_first) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int seen = (int)max((i64)-1, min((i64)KEYS, seen_by(g, mine + 8 * h) - key0));
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (8 * n + lane % 4 * 2 + i >= seen) score[n / 8][n % 8][2 * h + i] = -infinity<float>();
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = score[0][0][2 * h], other = score[0][0][2 * h + 1];
#pragma unroll
      for (int n = 1; n < KEYS / 8; ++n)
        high = fmaxf(high, score[n / 8][n % 8][2 * h]), other = fmaxf(other, score[n / 8][n % 8][2 * h + 1]);
      high = fmaxf(high, other);
      high = fmaxf(high, from_lane(high, 1));
      high = fmaxf(high, from_lane(high, 2));
      high = fmaxf(most[h], high * factor);
      const float base = level(high);
      shrink[h] = power2(most[h] - base);
      most[h] = high;
      float part[4] = {};  // one sum would wait for itself
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& each = score[n / 8][n % 8][2 * h + i];
          part[2 * (n % 2) + i] += each = power2(fmaf(each, factor, -base));
        }
      total[h] = total[h] * shrink[h] + (part[0] + part[1] + (part[2] + part[3]));
    }
  };
  auto round = [&] {
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&each)[4] = score[step / 4][step % 4 * 2 + i / 2];
        weights[step][i] = pack(T(), each[i % 2 * 2], each[i % 2 * 2 + 1]);
      }
  };
  // Who sees an infinity or a NaN is given it; the products had 0 in its place.
  auto give = [&](i64 tile) {
    const i64 key0 = tile * KEYS;
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
            for (int h = 0; h < 2; ++h)
              if (key0 + key < seen_by(g, mine + 8 * h)) sums[n / 8][n % 8][2 * h + i] += widen(each);
        }
  };
  // Of the values of a tile that some row does not see all of: infinities and NaNs out.
  auto clear = [&](i64 tile) {
    if (tile * KEYS + KEYS <= seen_first) return false;
    bool found = clear_nonfinite<T, TILE, THREADS>(values + ((tile - begin) & 1) * TILE);
    publish();
    __syncthreads();
    return found;
  };

  fetch_panels<T, D, ROWS, THREADS>(queries, q, row0, g.seq_q, dim, width);
  if (begin < end) {
    fetch_panels<T, D, KEYS, THREADS>(keys, k, begin * KEYS, g.seq_kv, dim, width);
    commit();
    fetch_panels<T, D, KEYS, THREADS>(values, v, begin * KEYS, g.seq_kv, dim, width);
    if (begin + 1 < end) fetch_panels<T, D, KEYS, THREADS>(keys + TILE, k, (begin + 1) * KEYS, g.seq_kv, dim, width);
    commit();
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    publish();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      matrices(query[step], (u32)__cvta_generic_to_shared(queries) + panel_place<ROWS>(warp * 16 + lane % 16, 2 * step + lane / 16));
      if (scale < 0)  // what follows takes the largest product for the largest score
#pragma unroll
        for (int i = 0; i < 4; ++i) query[step][i] ^= 0x80008000u;
    }
    begin_products();
    start_scores(begin);
    await_products<0>();
    hold(score);
    weigh(begin);
    round();
    for (i64 tile = begin; tile + 1 < end; ++tile) {
      arrived();
      publish();
      __syncthreads();
      if (tile + 2 < end) fetch_panels<T, D, KEYS, THREADS>(keys + ((tile - begin) & 1) * TILE, k, (tile + 2) * KEYS, g.seq_kv, dim, width);
      fetch_panels<T, D, KEYS, THREADS>(values + ((tile + 1 - begin) & 1) * TILE, v, (tile + 1) * KEYS, g.seq_kv, dim, width);
      commit();
      const bool nonfinite = clear(tile);
      begin_products();
      start_scores(tile + 1);
      start_sums(tile);
      await_products<1>();
      hold(score);
      weigh(tile + 1);
      // A wait moves up past arithmetic, but past no barrier: one whose number takes the weights keeps it behind them. No total is less than 0.
      hold(score);
      asm volatile("bar.sync %0, 128;" ::"r"(1 + warp / 4 + (total[0] + total[1] < 0 ? 1 : 0)) : "memory");
      await_products<0>();
      hold(sums);
      if (nonfinite) give(tile);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n / 8][n % 8][i] *= shrink[i / 2];
      round();
    }
    arrived();
    publish();
    __syncthreads();
    const bool nonfinite = clear(end - 1);
    begin_products();
    start_sums(end - 1);
    await_products<0>();
    hold(sums);
    if (nonfinite) give(end - 1);
  }
  arrived();
  store<T, D>(reinterpret_cast<float(&)[D / 8][4]>(sums), most, total, o, workspace, groups, g, head, mine, splits);
}

#define GROUPED(T, D, KEYS, GROUPS, BLOCKS)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                                                          \
      attention_grouped_##T##_##D(const T* q, const T* k, const T* v, T* o, void* workspace, i64 groups, i64 seq_q, i64 seq_kv, i64 dim,      \
                                  i64 first, double scale, i64 splits, i64 tiles_each) {                                                      \
    attend_by_groups<T, D, KEYS, GROUPS>(q, k, v, o, workspace, groups, Sizes{seq_q, seq_kv, dim, first}, scale, splits, tiles_each);         \
  }
#else
#define GROUPED(T, D, KEYS, GROUPS, BLOCKS)
#endif
