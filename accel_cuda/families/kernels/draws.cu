// Random numbers that take a chain of functions, and Sobol's sequence. They are a program of their own, which takes long to compile. It follows philox.cuh.

// accel.ops.distributions computes the parameters. All is computed in f64, so that decisions are as on any other device.
struct Constants { f64 v[10]; };
DEVICE f64 fraction(const Block& block, int i) { return (f64)(pair(block, i) >> 11) * 0x1p-53; }
DEVICE f64 inner(const Block& block, int i) { return ((f64)(pair(block, i) >> 12) + 0.5) * 0x1p-52; }

template <class T> struct TruncatedNormal {
  typedef T type;
  static constexpr int count = 2;
  Constants c;
  DEVICE TruncatedNormal(const Constants& c) : c(c) {}
  DEVICE void of(const Block& block, u64, u64, T* y) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      f64 z = fmin(fmax(normcdfinv(c.v[0] + fraction(block, i) * c.v[1]), c.v[2]), c.v[3]);
      y[i] = (T)fmin(fmax(c.v[4] + c.v[5] * z, c.v[6]), c.v[7]);
    }
  }
};
// A number of the gamma distribution; `boost` is the logarithm of what it is to be multiplied by.
DEVICE f64 gamma_parts(u64 seed, u64 index, u32 last, Block block, f64 d, f64 c, f64 power, f64& boost) {
  f64 v;
  for (u32 attempt = 0;; block = philox(seed, index, ++attempt, last)) {
    f64 x = sqrt(-2.0 * log(inner(block, 0))) * cospi(2.0 * inner(block, 1)), root = 1.0 + c * x;
    v = root * root * root;
    if (root > 0.0 && log(inner(philox(seed, index, attempt, last + 1), 0)) < 0.5 * x * x + d * (1.0 - v + log(v))) break;
  }
  boost = power != 0.0 ? log(inner(philox(seed, index, 0, last + 2), 0)) * power : 0.0;
  return d * v;
}
template <class T> struct Gamma {
  typedef T type;
  static constexpr int count = 1;
  Constants c;
  DEVICE Gamma(const Constants& c) : c(c) {}
  DEVICE void of(const Block& block, u64 seed, u64 index, T* y) const {
    f64 boost, made = gamma_parts(seed, index, 0, block, c.v[0], c.v[1], c.v[2], boost);
    *y = (T)((c.v[2] != 0.0 ? made * exp(boost) : made) * c.v[3]);
  }
};
template <class T> struct Beta {
  typedef T type;
  static constexpr int count = 1;
  Constants c;
  DEVICE Beta(const Constants& c) : c(c) {}
  DEVICE void of(const Block& block, u64 seed, u64 index, T* y) const {
    f64 boost_x, x = gamma_parts(seed, index, 0, block, c.v[0], c.v[1], c.v[2], boost_x);
    f64 boost_z, z = gamma_parts(seed, index, 3, philox(seed, index, 0, 3), c.v[3], c.v[4], c.v[5], boost_z);
    *y = (T)(1.0 / (1.0 + z / x * exp(boost_z - boost_x)));
  }
};
// The first count whose distribution function exceeds a fraction. Nothing is contracted, so that counts are the same everywhere.
struct Searched {
  typedef i64 type;
  static constexpr int count = 1;
  Constants c;
  DEVICE Searched(const Constants& c) : c(c) {}
  DEVICE void of(const Block& block, u64, u64, i64* y) const {
    f64 u = fraction(block, 0), probability = c.v[0], total = probability, k = 0.0;
    while (u >= total) {
      probability = __ddiv_rn(__dmul_rn(probability, __dsub_rn(c.v[1], __dmul_rn(c.v[2], k))), k + 1.0);
      f64 next = __dadd_rn(total, probability);
      if (next == total) break;
      total = next;
      k += 1.0;
    }
    *y = (i64)(c.v[3] != 0.0 ? c.v[3] - k : k);
  }
};
// What Stirling's formula lacks of log(k!), for k below 16.
__constant__ f64 stirling_errors[16] = {
    0.0, 0.08106146679532733, 0.04134069595540901, 0.027677925684998606, 0.020790672103764507, 0.016644691189823035, 0.013876128823071987,
    0.011896709945892425, 0.010411265261973668, 0.00925546218270945, 0.008330563433359472, 0.007573675487950737, 0.00694284010720736,
    0.006408994188003447, 0.00595137011276492, 0.005554733551960567};
// log(mean**k * exp(-mean) / k! * sqrt(2 pi)), by Loader.
DEVICE f64 log_term(f64 k, f64 mean) {
  if (k == 0.0) return 0.91893853320467274178 - mean;
  f64 ratio = (k - mean) / mean, square = k * k, error;
  if (k < 16.0) error = stirling_errors[(int)k];
  else error = (1.0 / 12 - (1.0 / 360 - (1.0 / 1260 - 1.0 / 1680 / square) / square) / square) / k;
  return -(error + mean * ((1.0 + ratio) * log1p(ratio) - ratio) + 0.5 * log(k));
}
// Hoermann's transformed rejection. What is proposed is rounded alike everywhere.
struct Rejected {
  typedef i64 type;
  static constexpr int count = 1;
  Constants c;
  DEVICE Rejected(const Constants& c) : c(c) {}
  DEVICE void of(Block block, u64 seed, u64 index, i64* y) const {
    f64 a = c.v[0], b = c.v[1], most = c.v[6], k;
    for (u32 attempt = 0;; block = philox(seed, index, ++attempt)) {
      f64 u = inner(block, 0) - 0.5, v = inner(block, 1), room = 0.5 - fabs(u);
      k = floor(__dadd_rn(__dmul_rn(__dadd_rn(__ddiv_rn(2.0 * a, room), b), u), c.v[2]));
      if (room >= 0.07 && v <= c.v[3]) break;
      if (k < 0.0 || k > most) continue;
      f64 bound = log_term(k, c.v[5]);
      if (c.v[7] != 0.0) bound += log_term(most - k, c.v[7]);
      if (log(v / (a / (room * room) + b)) + c.v[4] <= bound) break;
    }
    *y = (i64)(c.v[8] != 0.0 ? c.v[8] - k : k);
  }
};

#define DRAW_WIDE(name, D)                                                                                                            \
  extern "C" __global__ void name(D::type* out, i64 n, u64 seed, u64 offset, f64 a, f64 b, f64 c, f64 d, f64 e, f64 f, f64 g, f64 h, \
                                  f64 i, f64 j) {                                                                                    \
    philox_draw(out, n, seed, offset, D(Constants{{a, b, c, d, e, f, g, h, i, j}}));                                                 \
  }
DRAW_WIDE(draws_gamma_f32, Gamma<f32>)
DRAW_WIDE(draws_gamma_f64, Gamma<f64>)
DRAW_WIDE(draws_beta_f32, Beta<f32>)
DRAW_WIDE(draws_beta_f64, Beta<f64>)
DRAW_WIDE(draws_truncated_normal_f32, TruncatedNormal<f32>)
DRAW_WIDE(draws_truncated_normal_f64, TruncatedNormal<f64>)
DRAW_WIDE(draws_searched, Searched)
DRAW_WIDE(draws_rejected, Rejected)

// Point `first + i` of Sobol's sequence in order of Gray's code: what its bits choose of a coordinate's 32 directions, and a shift behind them.
template <class T> DEVICE void sobol(const u32* directions, T* out, i64 size, i64 width, u64 first) {
  i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size) return;
  i64 point = at;
  const u32* v = directions + split(point, width) * 33;
  u64 place = first + (u64)point;
  u32 x = v[32];
  int k = 0;
  for (u32 code = (u32)(place ^ place >> 1); code; code >>= 1, ++k)
    if (code & 1) x ^= v[k];
  if constexpr (sizeof(T) == 4) out[at] = (f32)(x >> 8) * 0x1p-24f;
  else out[at] = (f64)x * 0x1p-32;
}
extern "C" __global__ void sobol_f32(const u32* directions, f32* out, i64 size, i64 width, u64 first) { sobol(directions, out, size, width, first); }
extern "C" __global__ void sobol_f64(const u32* directions, f64* out, i64 size, i64 width, u64 first) { sobol(directions, out, size, width, first); }
