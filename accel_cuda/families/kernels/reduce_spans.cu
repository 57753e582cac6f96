// Reductions of spans of rows, and the kernels of all reductions.

constexpr u32 SPAN = 2048, SLOT = SPAN + 16, SLOTS = HAS_ENGINE ? 11 : 8, STAGES = 2;

// A piece is `columns` columns wide and as long as the block's chunk; its spans hold `fold` rows each.
template <class T> struct Piece {
  const T* start;
  i64 out;
  u32 columns;
  DEVICE Piece(const T* x, i64 piece, i64 length, i64 inner, i64 fold, i64 tiles, i64 columns, i64 first) {
    const i64 slice = piece < tiles ? 0 : piece <= 0xffffffffll ? (i64)((u32)piece / (u32)tiles) : piece / tiles, column = (piece - slice * tiles) * columns;
    start = x + (slice * length + first * fold) * inner + column, out = slice * inner + column;
    this->columns = (u32)min(columns, fold * inner - column);
  }
};

template <class Op, class T>
DEVICE void spans(const T* __restrict__ x, T* y, i64 outer, i64 length, i64 inner, i64 fold, i64 tiles, i64 columns, i64 each, i64 chunk, i64 divisor) {
  typedef typename Op::template Accumulator<T> W;
  constexpr u32 SIZE = sizeof(T), J = SPAN / SIZE > THREADS ? SPAN / SIZE / THREADS : 1;
  __shared__ alignas(16) char tile[STAGES][SLOTS * SLOT];
  __shared__ u64 barriers[STAGES];
  const i64 piece0 = (i64)blockIdx.x * each, first = (i64)blockIdx.y * chunk, left = length - first * fold, step = fold * inner;
  const u32 spans = (u32)min(chunk, (left + fold - 1) / fold), pieces = (u32)min(each, outer * tiles - piece0);
  // A tile has as many spans as there is room for, of one piece after the other. Each is asked for by one thread, or brought by one warp.
  const u32 total = pieces * spans, own_slot = HAS_ENGINE ? threadIdx.x : threadIdx.x / 32;
  auto piece_at = [&](u32 piece) { return Piece<T>(x, piece0 + piece, length, inner, fold, tiles, columns, first); };
  u32 next = own_slot;
  auto bring_next = [&](u32 stage) {
    const u32 piece = next / spans, span = next - piece * spans;
    next += SLOTS;
    if (own_slot >= SLOTS) return;
    u64 base = 0;
    u32 granules = 0;
    if (piece < pieces) {
      const Piece<T> from = piece_at(piece);
      const T* start = from.start + span * step;
      const u64 end = (u64)(start + min((i64)from.columns, (left - span * fold) * inner));
      base = (u64)start & ~15ull, granules = (u32)((end + 15 - base) / 16);
    }
    char* slot = tile[stage] + own_slot * SLOT;
    if (HAS_ENGINE) bring_part<T>(slot, base, granules, (u64)x, (u64)(x + outer * length * inner), &barriers[stage]);
    else bring<T>(slot, base, granules, threadIdx.x % 32, 32, (u64)x, (u64)(x + outer * length * inner));
    commit();
  };
  if (HAS_ENGINE) {
    if (threadIdx.x < STAGES) open_barrier(&barriers[threadIdx.x], SLOTS);
    __syncthreads();
  }
  for (u32 stage = 0; stage + 1 < STAGES; ++stage) bring_next(stage);
  auto deliver = [&](i64 out, W value) {
    if (gridDim.y > 1) ((W*)y)[(i64)blockIdx.y * outer * inner + out] = value;
    else finish(y + out, value, divisor_of<W>(divisor));
  };
  W acc[J];
  // With elements of 16 bytes half of the threads have none.
  const u32 own = min(threadIdx.x, SPAN / SIZE - 1) * SIZE, further = (u32)step * SIZE;
  u32 low = 0;
  Piece<T> here(x, piece0, length, inner, fold, tiles, columns, first);
  for (u32 done = 0, piece = 0, span = 0, stage = 0, phase = 0; done < total; done += SLOTS) {
    // The next tiles are on their way while this one is taken.
    bring_next(stage ? stage - 1 : STAGES - 1);
    if (HAS_ENGINE) await_barrier(&barriers[stage], phase);
    else arrive<STAGES - 1>(), __syncthreads();
    const char* place = tile[stage] + own;
    for (u32 rest = min(SLOTS, total - done); rest;) {
      const u32 mine = min(rest, spans - span);
      if (span == 0) {
        here = piece_at(piece), low = (u32)(u64)here.start;
#pragma unroll
        for (u32 j = 0; j < J; ++j) acc[j] = Op::template identity<W>();
      }
      // Beyond a row's end anything may be taken, for it is not delivered; beyond the last of folded rows nothing may.
      const u32 whole = fold == 1 || (span + mine) * fold <= left ? mine : mine - 1;
#pragma unroll 4
      for (u32 slot = 0; slot < whole; ++slot, low += further, place += SLOT)
#pragma unroll
        for (u32 j = 0; j < J; ++j) acc[j] = Op::of(acc[j], load<W>(*(const T*)(place + low % 16 + j * THREADS * SIZE)));
      if (whole < mine) {
        const u32 size = (u32)((left - (span + whole) * fold) * inner);
#pragma unroll
        for (u32 j = 0; j < J; ++j)
          if (threadIdx.x + j * THREADS < size) acc[j] = Op::of(acc[j], load<W>(*(const T*)(place + low % 16 + j * THREADS * SIZE)));
      }
      rest -= mine, span += mine;
      if (span < spans) continue;
      span = 0, ++piece;
      if (fold > 1) continue;
#pragma unroll
      for (u32 j = 0; j < J; ++j)
        if (threadIdx.x + j * THREADS < here.columns) deliver(here.out + threadIdx.x + j * THREADS, acc[j]);
    }
    __syncthreads();
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  if (fold == 1) return;
  // The block's only piece: its folded rows become one.
  W* sums = (W*)tile[0];
#pragma unroll
  for (u32 j = 0; j < J; ++j)
    if (threadIdx.x + j * THREADS < (u32)columns) sums[threadIdx.x + j * THREADS] = acc[j];
  for (u32 high = (u32)fold; high > 1;) {
    const u32 half = (high + 1) / 2;
    __syncthreads();
    for (u32 c = threadIdx.x; c < (high - half) * (u32)inner; c += THREADS) sums[c] = Op::of(sums[c], sums[c + half * (u32)inner]);
    high = half;
  }
  __syncthreads();
  for (u32 c = threadIdx.x; c < (u32)inner; c += THREADS) deliver(piece0 * inner + c, sums[c]);
}

#define KERNEL(kind, name, T, blocks) extern "C" __global__ void __launch_bounds__(256, blocks) reduce_##kind##_##name##_##T
#define REDUCE(name, Op, T, U)                                                                                                          \
  KERNEL(brief, name, T, 6)(const T* x, T* y, i64 rows, i64 length, i64 some, i64 d) { brief<Op>(x, y, rows, length, some, d); }        \
  KERNEL(group, name, T, 6)(const T* x, T* y, i64 rows, i64 length, i64 some, i64 shift, i64 d) { group<Op>(x, y, rows, length, some, shift, d); } \
  KERNEL(rows, name, T, 1)(const T* x, T* y, i64 length, i64 chunk, i64 d) { rows<Op>(x, y, length, chunk, d); }                        \
  KERNEL(slices, name, T, sizeof(T) > 8 ? 4 : 6)(const T* x, T* y, i64 o, i64 l, i64 i, i64 some, i64 shift, i64 d) { slices<Op>(x, y, o, l, i, some, shift, d); } \
  KERNEL(spans, name, T, 4)(const T* x, T* y, i64 o, i64 l, i64 i, i64 fold, i64 tiles, i64 columns, i64 each, i64 chunk, i64 d) {      \
    spans<Op>(x, y, o, l, i, fold, tiles, columns, each, chunk, d);                                                                     \
  }                                                                                                                                     \
  KERNEL(finish, name, T, 1)(const Op::Accumulator<T>* x, T* y, i64 chunks, i64 results, i64 d) { finish<Op>(x, y, chunks, results, d); }
