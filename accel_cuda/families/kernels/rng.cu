// Random numbers that are made of one function of a word, as accel.ops.rng defines them. It follows philox.cuh.

DEVICE f32 root(f32 x) { f32 y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
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
struct ExponentialF32 {
  typedef f32 type;
  static constexpr int count = 4;
  f32 scale;
  DEVICE ExponentialF32(u64 a, u64, u64) : scale((f32)real(a)) {}
  DEVICE void of(const Block& block, u64, u64, f32* y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = -logf((f32)block.w[i] * 0x1p-32f + 0x1p-33f) * scale;
  }
};
struct ExponentialF64 {
  typedef f64 type;
  static constexpr int count = 2;
  f64 scale;
  DEVICE ExponentialF64(u64 a, u64, u64) : scale(real(a)) {}
  DEVICE void of(const Block& block, u64, u64, f64* y) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = -log(((f64)(pair(block, i) >> 11) + 0.5) * 0x1p-53) * scale;
  }
};
struct Bernoulli {
  typedef u8 type;
  static constexpr int count = 4;
  u64 limit;
  DEVICE Bernoulli(u64 a, u64, u64) : limit(a) {}
  DEVICE void of(const Block& block, u64, u64, u8* y) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = block.w[i] < limit;
  }
};

DRAW(philox_uniform_f32, UniformF32)
DRAW(philox_uniform_f64, UniformF64)
DRAW(philox_normal_f32, NormalF32<false>)
DRAW(philox_normal_f64, NormalF64<false>)
DRAW(philox_lognormal_f32, NormalF32<true>)
DRAW(philox_lognormal_f64, NormalF64<true>)
DRAW(philox_words_1, Words<u8>)
DRAW(philox_words_2, Words<u16>)
DRAW(philox_words_4, Words<u32>)
DRAW(philox_words_8, Words<u64>)
DRAW(philox_pairs_8, Pairs<u64>)
DRAW(philox_exponential_f32, ExponentialF32)
DRAW(philox_exponential_f64, ExponentialF64)
DRAW(philox_bernoulli, Bernoulli)
