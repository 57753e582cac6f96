// Pooling of [before, depth, height, width, behind] arrays along the three axes in the middle, and its gradients: a thread makes one result, or a pack of
// neighbours behind the axes.

struct Pool {
  u64 x, y, grad;
  i64 size, behind;  // packs of results, and how many of them are behind the axes
  i64 sizes[3], counts[3], window[3], stride[3], ahead[3], counts_padding;  // ahead: what is padded before an axis
};

// Elements along the last axis that are read before the first of them is used.
constexpr int AT_ONCE = 4;

struct Largest { template <class W> static DEVICE W none() { return -(W)__int_as_float(0x7f800000); } template <class W> static DEVICE W of(W a, W b) { return larger(a, b); } };
struct Total { template <class W> static DEVICE W none() { return W(0); } template <class W> static DEVICE W of(W a, W b) { return a + b; } };

template <class F, bool IS_MEAN, class T, int N, class I> DEVICE void pool(const Pool& p, I i) {
  typedef typename Wide<T>::type W;
  int begin[3], end[3];
  i64 elements = 1, reach = 1;
  I rest = i / (I)p.behind;
  const i64 behind = (i64)(i - rest * (I)p.behind);
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const I next = rest / (I)p.counts[d];
    const int start = (int)((i64)(rest - next * (I)p.counts[d]) * p.stride[d] - p.ahead[d]);
    begin[d] = max(start, 0), end[d] = (int)min(start + p.window[d], p.sizes[d]);
    elements *= end[d] - begin[d], reach *= p.window[d];
    rest = next;
  }
  const Pack<T, N>* x = (const Pack<T, N>*)p.x + (i64)rest * p.sizes[0] * p.sizes[1] * p.sizes[2] * p.behind + behind;
  W made[N];
#pragma unroll
  for (int n = 0; n < N; ++n) made[n] = F::template none<W>();
#pragma unroll 1
  for (int d = begin[0]; d < end[0]; ++d)
#pragma unroll 1
    for (int h = begin[1]; h < end[1]; ++h) {
      const Pack<T, N>* line = x + (d * p.sizes[1] + h) * p.sizes[2] * p.behind;
#pragma unroll 1
      for (int w = begin[2]; w < end[2]; w += AT_ONCE) {
        Pack<T, N> packs[AT_ONCE];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a)
          if (w + a < end[2]) packs[a] = line[(w + a) * p.behind];
#pragma unroll
        for (int a = 0; a < AT_ONCE; ++a)
          if (w + a < end[2])
#pragma unroll
            for (int n = 0; n < N; ++n) made[n] = F::of(made[n], (W)widen(packs[a].v[n]));
      }
    }
  Pack<T, N> result;
  const W divisor = (W)(p.counts_padding ? reach : elements);
#pragma unroll
  for (int n = 0; n < N; ++n) result.v[n] = narrow<T>(IS_MEAN ? made[n] / divisor : made[n]);
  ((Pack<T, N>*)p.y)[i] = result;
}
template <class F, bool IS_MEAN, class T, int N> DEVICE void pool(const Pool& p) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.size) return;
  if (p.size <= 0x7fffffffll) pool<F, IS_MEAN, T, N>(p, (u32)i);
  else pool<F, IS_MEAN, T, N>(p, (u64)i);
}

// The gradient of one element: of all windows that it is in, the share of a mean, or all where it is the first of the largest.
template <bool IS_MEAN, class T, int N, class I> DEVICE void pool_grad(const Pool& p, I i) {
  typedef typename Wide<T>::type W;
  int place[3], first[3], last[3];
  I rest = i / (I)p.behind;
  const i64 behind = (i64)(i - rest * (I)p.behind);
#pragma unroll
  for (int d = 2; d >= 0; --d) {
    const I next = rest / (I)p.sizes[d];
    place[d] = (int)(i64)(rest - next * (I)p.sizes[d]);
    const i64 end = place[d] + p.ahead[d], begin = end - p.window[d] + 1;
    first[d] = begin <= 0 ? 0 : (int)((begin + p.stride[d] - 1) / p.stride[d]);
    last[d] = (int)min(end / p.stride[d], p.counts[d] - 1);
    rest = next;
  }
  const i64 outer = (i64)rest;
  const Pack<T, N>* grads = (const Pack<T, N>*)p.grad + outer * p.counts[0] * p.counts[1] * p.counts[2] * p.behind + behind;
  const Pack<T, N>* x = (const Pack<T, N>*)p.x + outer * p.sizes[0] * p.sizes[1] * p.sizes[2] * p.behind + behind;
  Pack<T, N> mine;
  if constexpr (!IS_MEAN) mine = ((const Pack<T, N>*)p.x)[i];
  W total[N];
#pragma unroll
  for (int n = 0; n < N; ++n) total[n] = W(0);
#pragma unroll 1
  for (int a = first[0]; a <= last[0]; ++a)
#pragma unroll 1
    for (int b = first[1]; b <= last[1]; ++b)
#pragma unroll 1
      for (int c = first[2]; c <= last[2]; ++c) {
        const Pack<T, N> grad = grads[((a * p.counts[1] + b) * p.counts[2] + c) * p.behind];
        const int window[3] = {a, b, c};
        int begin[3], end[3];
        i64 elements = 1, reach = 1;
#pragma unroll
        for (int d = 0; d < 3; ++d) {
          const i64 start = window[d] * p.stride[d] - p.ahead[d];
          begin[d] = (int)max(start, 0ll), end[d] = (int)min(start + p.window[d], p.sizes[d]);
          elements *= end[d] - begin[d], reach *= p.window[d];
        }
        if constexpr (IS_MEAN) {
          const W divisor = (W)(p.counts_padding ? reach : elements);
#pragma unroll
          for (int n = 0; n < N; ++n) total[n] += (W)widen(grad.v[n]) / divisor;
        } else {
          bool is_largest[N];
#pragma unroll
          for (int n = 0; n < N; ++n) is_largest[n] = true;
          const i64 own = ((i64)place[0] * p.sizes[1] + place[1]) * p.sizes[2] + place[2];
#pragma unroll 1
          for (int d = begin[0]; d < end[0]; ++d)
#pragma unroll 1
            for (int h = begin[1]; h < end[1]; ++h)
#pragma unroll 1
              for (int w = begin[2]; w < end[2]; ++w) {
                const i64 other = ((i64)d * p.sizes[1] + h) * p.sizes[2] + w;
                const Pack<T, N> pack = x[other * p.behind];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                  const W value = widen(pack.v[n]), ours = widen(mine.v[n]);
                  // One before that is as large comes first, and a NaN is larger than any number.
                  if (other < own) is_largest[n] &= !(value != value || value >= ours);
                  else if (other > own) is_largest[n] &= ours != ours || !(value != value || value > ours);
                }
              }
#pragma unroll
          for (int n = 0; n < N; ++n)
            if (is_largest[n]) total[n] += (W)widen(grad.v[n]);
        }
      }
  Pack<T, N> result;
#pragma unroll
  for (int n = 0; n < N; ++n) result.v[n] = narrow<T>(total[n]);
  ((Pack<T, N>*)p.y)[i] = result;
}
template <bool IS_MEAN, class T, int N> DEVICE void pool_grad(const Pool& p) {
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.size) return;
  if (p.size <= 0x7fffffffll) pool_grad<IS_MEAN, T, N>(p, (u32)i);
  else pool_grad<IS_MEAN, T, N>(p, (u64)i);
}

#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) pool_##name
#define POOL(T)                                                                                                             \
  KERNEL(largest_packed_##T)(const __grid_constant__ Pool p) { pool<Largest, false, T, Lanes<T>::count>(p); }                   \
  KERNEL(largest_single_##T)(const __grid_constant__ Pool p) { pool<Largest, false, T, 1>(p); }                                 \
  KERNEL(mean_packed_##T)(const __grid_constant__ Pool p) { pool<Total, true, T, Lanes<T>::count>(p); }                     \
  KERNEL(mean_single_##T)(const __grid_constant__ Pool p) { pool<Total, true, T, 1>(p); }                                   \
  KERNEL(largest_grad_packed_##T)(const __grid_constant__ Pool p) { pool_grad<false, T, Lanes<T>::count>(p); }              \
  KERNEL(largest_grad_single_##T)(const __grid_constant__ Pool p) { pool_grad<false, T, 1>(p); }                            \
  KERNEL(mean_grad_packed_##T)(const __grid_constant__ Pool p) { pool_grad<true, T, Lanes<T>::count>(p); }                  \
  KERNEL(mean_grad_single_##T)(const __grid_constant__ Pool p) { pool_grad<true, T, 1>(p); }
