// Random numbers, as accel.ops.rng defines them.

DEVICE u64 pair(const Block& block, int i) { return block.w[2 * i] | (u64)block.w[2 * i + 1] << 32; }
DEVICE f32 root(f32 x) { f32 y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE double real(u64 bits) { return __longlong_as_double((i64)bits); }

// Each distribution turns a block into `count` numbers. What is rounded here is rounded as on any other device: nothing is contracted.
struct UniformF32 {
  typedef f32 type;
  static constexpr int count = 4;
  f32 low, width, last;
  DEVICE UniformF32(u64 a, u64 b, u64 c) : low((f32)real(a)), width((f32)real(b)), last((f32)real(c)) {}
  DEVICE void of(const Block& block, u64, u64, f32* y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = fminf(__fadd_rn(__fmul_rn((f32)(block.w[i] >> 8) * 0x1p-24f, width), low), last);
  }
};
struct UniformF64 {
  typedef f64 type;
  static constexpr int count = 2;
  f64 low, width, last;
  DEVICE UniformF64(u64 a, u64 b, u64 c) : low(real(a)), width(real(b)), last(real(c)) {}
  DEVICE void of(const Block& block, u64, u64, f64* y) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = fmin(__dadd_rn(__dmul_rn((f64)(pair(block, i) >> 11) * 0x1p-53, width), low), last);
  }
};
template <bool is_log> struct NormalF32 {
  typedef f32 type;
  static constexpr int count = 4;
  f32 mean, deviation;
  DEVICE NormalF32(u64 a, u64 b, u64) : mean((f32)real(a)), deviation((f32)real(b)) {}
  DEVICE f32 scaled(f32 z) const {
    f32 y = z * deviation + mean;
    if constexpr (is_log) return expf(y);
    else return y;
  }
  DEVICE void of(const Block& block, u64, u64, f32* y) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      f32 radius = root(-2.0f * logf((f32)block.w[i] * 0x1p-32f + 0x1p-33f)), sine, cosine;
      sincospif((f32)block.w[i + 1] * 0x1p-31f, &sine, &cosine);
      y[i] = scaled(radius * cosine);
      y[i + 1] = scaled(radius * sine);
    }
  }
};
template <bool is_log> struct NormalF64 {
  typedef f64 type;
  static constexpr int count = 2;
  f64 mean, deviation;
  DEVICE NormalF64(u64 a, u64 b, u64) : mean(real(a)), deviation(real(b)) {}
  DEVICE f64 scaled(f64 z) const {
    f64 y = z * deviation + mean;
    if constexpr (is_log) return exp(y);
    else return y;
  }
  DEVICE void of(const Block& block, u64, u64, f64* y) const {
    f64 radius = sqrt(-2.0 * log(((f64)(pair(block, 0) >> 11) + 0.5) * 0x1p-53)), sine, cosine;
    sincospi((f64)(pair(block, 1) >> 11) * 0x1p-52, &sine, &cosine);
    y[0] = scaled(radius * cosine);
    y[1] = scaled(radius * sine);
  }
};
// `limit` is below which the lower half of a product would favour some values.
template <class T> struct Words {
  typedef T type;
  static constexpr int count = 4;
  u64 low, span, limit;
  DEVICE Words(u64 a, u64 b, u64 c) : low(a), span(b), limit(c) {}
  DEVICE void of(const Block& block, u64 seed, u64 index, T* y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u64 product = block.w[i] * span;
      for (u32 attempt = 1; (u32)product < (u32)limit; ++attempt) product = philox(seed, index, attempt).w[i] * span;
      y[i] = (T)(low + (product >> 32));
    }
  }
};
// A span of 0 is all of 2**64.
template <class T> struct Pairs {
  typedef T type;
  static constexpr int count = 2;
  u64 low, span, limit;
  DEVICE Pairs(u64 a, u64 b, u64 c) : low(a), span(b), limit(c) {}
  DEVICE void of(const Block& block, u64 seed, u64 index, T* y) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u64 word = pair(block, i);
      for (u32 attempt = 1; word * span < limit; ++attempt) word = pair(philox(seed, index, attempt), i);
      y[i] = (T)(low + (span ? __umul64hi(word, span) : word));
    }
  }
};

constexpr int THREADS = 256, BLOCKS = 4;

// Writes the numbers of blocks that lie between `offset` and `offset + n`. A thread's block is `index`, its neighbours' are those beside it.
template <class D> struct Writer {
  typedef typename D::type T;
  typedef Pack<T, D::count> P;
  T* out;
  i64 n;
  u64 seed, offset;
  D numbers;
  // Whether a block's numbers can be stored as one.
  bool is_straight;
  DEVICE Writer(T* out, i64 n, u64 seed, u64 offset, D numbers)
      : out(out), n(n), seed(seed), offset(offset), numbers(numbers), is_straight(offset % D::count == 0 && (u64)out % sizeof(P) == 0) {}
  DEVICE i64 place(u64 index) const { return (i64)(index * D::count - offset); }
  DEVICE P made(const Block& block, u64 index) const {
    P made;
    numbers.of(block, seed, index, made.v);
    return made;
  }
  DEVICE bool is_inside(u64 first, u64 blocks) const { return place(first) >= 0 && place(first + blocks) <= n; }
  DEVICE void store(const P& made, u64 index) const { *(P*)(out + place(index)) = made; }
  DEVICE void store_some(const P& made, u64 index) const {
#pragma unroll
    for (int i = 0; i < D::count; ++i)
      if (place(index) + i >= 0 && place(index) + i < n) out[place(index) + i] = made.v[i];
  }
  // Neighbours exchange their numbers, so that they store side by side. All threads call it together.
  DEVICE void store_across(const P& made, u64 index) const {
    __shared__ P shared[THREADS];
    __syncthreads();
    shared[threadIdx.x] = made;
    __syncthreads();
    i64 first = place(index - threadIdx.x);
#pragma unroll
    for (int i = 0; i < D::count; ++i) {
      int at = i * THREADS + threadIdx.x;
      if (first + at >= 0 && first + at < n) out[first + at] = ((const T*)shared)[at];
    }
  }
};

template <class D> DEVICE void philox_draw(typename D::type* out, i64 n, u64 seed, u64 offset, u64 a, u64 b, u64 c) {
  Writer<D> writer(out, n, seed, offset, D(a, b, c));
  u64 index = offset / D::count + (u64)blockIdx.x * (THREADS * BLOCKS), end = (offset + n + D::count - 1) / D::count;
  if (writer.is_straight && writer.is_inside(index, THREADS * BLOCKS)) {
    index += threadIdx.x;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i, index += THREADS) writer.store(writer.made(philox(seed, index, 0), index), index);
    return;
  }
  bool is_straight = writer.is_straight;
  for (int i = 0; i < BLOCKS && index < end; ++i, index += THREADS) {
    u64 own = index + threadIdx.x;
    auto made = writer.made(philox(seed, own, 0), own);
    if (is_straight) writer.store_some(made, own);
    else writer.store_across(made, own);
  }
}

#define DRAW(name, D)                                                                                        \
  extern "C" __global__ void philox_##name(D::type* out, i64 n, u64 seed, u64 offset, u64 a, u64 b, u64 c) { \
    philox_draw<D>(out, n, seed, offset, a, b, c);                                                           \
  }
DRAW(uniform_f32, UniformF32)
DRAW(uniform_f64, UniformF64)
DRAW(normal_f32, NormalF32<false>)
DRAW(normal_f64, NormalF64<false>)
DRAW(lognormal_f32, NormalF32<true>)
DRAW(lognormal_f64, NormalF64<true>)
DRAW(words_1, Words<u8>)
DRAW(words_2, Words<u16>)
DRAW(words_4, Words<u32>)
DRAW(words_8, Words<u64>)
DRAW(pairs_8, Pairs<u64>)
