// Cross-entropy of rows of logits, and its gradient. A row is read twice: for the largest and the sum of exponentials beside it, and for the results.
// A power of two of neighbouring lanes, or all warps of a block, have a row.

struct Losses {
  u64 grad, x, labels, y;
  i64 rows, length, width, ignored, is_long;  // is_long: labels are i64, else i32
};

template <bool IS_GRAD, class T, int N> DEVICE void losses(const Losses& l) {
  typedef typename Wide<T>::type W;
  __shared__ W parts[2][32];
  const int width = (int)l.width;
  int lane = threadIdx.x;
  i64 row = blockIdx.x;
  if (width <= 32) {
    const int shift = 31 - __clz(width);
    lane &= width - 1, row = row * (blockDim.x >> shift) + (threadIdx.x >> shift);
  }
  const bool is_row = row < l.rows;
  row = min(row, l.rows - 1);
  const T* x = (const T*)l.x + row * l.length;
  const i64 step = (i64)width * N;
  Exponents<T> state{-infinity<W>(), W(0)};
#pragma unroll 4
  for (i64 i = (i64)lane * N; i < l.length; i += step) {
    const Pack<T, N> pack = load_once<T, N>(x + i);
#pragma unroll
    for (int n = 0; n < N; ++n) state.take(widen(pack.v[n]));
  }
  const W most = across<Most>(state.most, width, parts[0]);
  W total = across<Sum>(state.total * exponential<T>(state.most - (most == -infinity<W>() ? W(0) : most)), width, parts[1]);
  if (!is_row) return;
  // Where the largest is infinite, nothing is a number.
  total += most - most;
  const i64 label = l.is_long ? ((const i64*)l.labels)[row] : (i64)((const i32*)l.labels)[row];
  const bool is_ignored = label == l.ignored, is_class = label >= 0 && label < l.length;
  const W nothing = infinity<W>() - infinity<W>();
  if constexpr (IS_GRAD) {
    const W factor = W(1) / total, grad = widen(((const T*)l.grad)[row]);
    T* y = (T*)l.y + row * l.length;
    for (i64 i = (i64)lane * N; i < l.length; i += step) {
      Pack<T, N> pack = load_once<T, N>(x + i);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const W share = exponential<T>((W)widen(pack.v[n]) - most) * factor - (i + n == label ? W(1) : W(0));
        pack.v[n] = narrow<T>(is_ignored ? W(0) : is_class ? share * grad : nothing);
      }
      store(y + i, pack);
    }
  } else if (lane == 0) {
    const W loss = is_class && !is_ignored ? log(total) - ((W)widen(x[label]) - most) : is_ignored ? W(0) : nothing;
    ((T*)l.y)[row] = narrow<T>(loss);
  }
}

#define LOSSES(name, IS_GRAD, T, how, N) \
  extern "C" __global__ void __launch_bounds__(512) loss_##name##_##how##_##T(const __grid_constant__ Losses l) { losses<IS_GRAD, T, N>(l); }
#define LOSS(T)                                                                              \
  LOSSES(value, false, T, packed, Lanes<T>::count) LOSSES(value, false, T, single, 1)        \
  LOSSES(grad, true, T, packed, Lanes<T>::count) LOSSES(grad, true, T, single, 1)
