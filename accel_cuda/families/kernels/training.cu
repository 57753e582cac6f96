// Norms for training, and gradients of norms and of softmax. Statistics are in the type that is computed in, and are never rounded to that of the elements.
//
// rows:    the gradient of x of norms of rows, and the mean and the factor of each row, which the sums take.
// sums:    two sums for each channel of a [outer, channels, each] array, in chunks; `finish` adds the chunks up in their order, so that sums have one order.
// apply:   batch norm, and its gradient of x, of the statistics and sums of the channels.
// softmax: gradients of softmax and of its logarithm: of rows, and along an axis with elements behind it.

constexpr int SUM_THREADS = 256, SUM_COLUMNS = 32, SUM_ROWS = 8;
enum { MEAN = 0, VARIANCE = 1, GRADIENTS = 2, ROW_GRADIENTS = 3 };

struct RowGrads {
  u64 grad, x, weight, y, mean, factor;  // weight: 0 if there is none
  i64 rows, length, groups, each, width;  // of row r of a CHANNELS norm, element i has the weight r % groups * (length / each) + i / each
  f64 eps;
};

// Returns the row of a thread, and which of its threads it is: a power of two of neighbouring lanes, or the whole block, has a row.
DEVICE i64 row_of(int width, int& lane) {
  lane = threadIdx.x;
  if (width > 32) return blockIdx.x;
  const int shift = 31 - __clz(width);
  lane &= width - 1;
  return (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
}

// Elements are taken N at a time: 16 bytes where all of a row lies so, else one by one. A row is read several times, from the second on out of the caches.
template <bool CENTRED, bool CHANNELS, class T, int N> DEVICE void row_grads(const RowGrads& r) {
  typedef typename Wide<T>::type W;
  typedef Pack<T, N> P;
  __shared__ W parts[4][32];
  const int width = (int)r.width;
  int lane;
  i64 row = row_of(width, lane);
  const bool is_row = row < r.rows;
  row = min(row, r.rows - 1);
  const i64 packs = r.length / N;
  const P *x = (const P*)((const T*)r.x + row * r.length), *grad = (const P*)((const T*)r.grad + row * r.length), *weight = (const P*)r.weight;
  const T* of_group = CHANNELS && r.weight ? (const T*)r.weight + row % r.groups * (r.length / r.each) : nullptr;
  const W count = (W)r.length;
  W mean = W(0), squares = W(0), level = W(0), along = W(0);
  if constexpr (CENTRED) {
#pragma unroll 4
    for (i64 i = lane; i < packs; i += width) {
      const P pack = x[i];
#pragma unroll
      for (int n = 0; n < N; ++n) mean += (W)widen(pack.v[n]);
    }
    mean = across<Sum>(mean, width, parts[0]) / count;
  }
#pragma unroll 4
  for (i64 i = lane; i < packs; i += width) {
    const P pack = x[i];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const W off = (W)widen(pack.v[n]) - mean;
      squares += off * off;
    }
  }
  const W factor = rsqrt(across<Sum>(squares, width, parts[1]) / count + (W)r.eps);
  // What comes of pack i: how each element is scaled, and its gradient.
  auto each = [&](i64 i, W (&scaled)[N], W (&change)[N]) {
    const P of_x = x[i], of_grad = grad[i];
    P factors;
    if constexpr (CHANNELS) {
      // All of a pack have one weight.
      if (weight) {
        const i64 at = i * N;
        const T factor = of_group[r.length <= 0x7fffffffll ? (i64)((u32)at / (u32)r.each) : at / r.each];
#pragma unroll
        for (int n = 0; n < N; ++n) factors.v[n] = factor;
      }
    } else if (weight) factors = weight[i];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      scaled[n] = ((W)widen(of_x.v[n]) - mean) * factor;
      change[n] = (W)widen(of_grad.v[n]) * (weight ? (W)widen(factors.v[n]) : W(1));
    }
  };
#pragma unroll 2
  for (i64 i = lane; i < packs; i += width) {
    W scaled[N], change[N];
    each(i, scaled, change);
#pragma unroll
    for (int n = 0; n < N; ++n) level += change[n], along += change[n] * scaled[n];
  }
  along = across<Sum>(along, width, parts[2]) / count;
  level = CENTRED ? across<Sum>(level, width, parts[3]) / count : W(0);
  if (!is_row) return;
  P* y = (P*)((T*)r.y + row * r.length);
#pragma unroll 2
  for (i64 i = lane; i < packs; i += width) {
    W scaled[N], change[N];
    each(i, scaled, change);
    P made;
#pragma unroll
    for (int n = 0; n < N; ++n) made.v[n] = narrow<T>((change[n] - level - scaled[n] * along) * factor);
    y[i] = made;
  }
  if (lane == 0) ((W*)r.mean)[row] = mean, ((W*)r.factor)[row] = factor;
}

struct Sums {
  u64 grad, x, mean, factor, partial;  // partial: [chunks, 2, channels]
  i64 outer, channels, each, chunks, groups;
};

// Where the mean and the factor of a channel are: its own, or of the norm of rows, those of the row that its group is in.
template <int KIND> DEVICE i64 statistics(const Sums& s, i64 outer, i64 channel, i64 group) {
  return KIND == ROW_GRADIENTS ? outer * s.groups + group : channel;
}

template <int KIND, class T, class W> DEVICE void add_to(const Sums& s, i64 at, i64 place, W& first, W& second) {
  W x = (W)widen(((const T*)s.x)[at]);
  if constexpr (KIND == MEAN) first += x;
  else {
    x -= ((const W*)s.mean)[place];
    if constexpr (KIND == VARIANCE) first += x * x;
    else {
      const W grad = (W)widen(((const T*)s.grad)[at]);
      first += grad * x * ((const W*)s.factor)[place], second += grad;
    }
  }
}

// A block takes a chunk of one channel.
template <int KIND, class T> DEVICE void wide_sums(const Sums& s) {
  typedef typename Wide<T>::type W;
  __shared__ W parts[2][32];
  const i64 channel = blockIdx.x % s.channels, chunk = blockIdx.x / s.channels, count = s.outer * s.each;
  const i64 share = (count + s.chunks - 1) / s.chunks, end = min(count, (chunk + 1) * share);
  const i64 group = KIND == ROW_GRADIENTS ? channel / (s.channels / s.groups) : 0;
  W first = W(0), second = W(0);
  for (i64 i = chunk * share + threadIdx.x; i < end; i += SUM_THREADS) {
    const i64 outer = count <= 0x7fffffffll ? (i64)((u32)i / (u32)s.each) : i / s.each;
    add_to<KIND, T>(s, (outer * s.channels + channel) * s.each + (i - outer * s.each), statistics<KIND>(s, outer, channel, group), first, second);
  }
  first = across<Sum>(first, SUM_THREADS, parts[0]);
  if constexpr (KIND >= GRADIENTS) second = across<Sum>(second, SUM_THREADS, parts[1]);
  if (threadIdx.x) return;
  W* to = (W*)s.partial + chunk * 2 * s.channels + channel;
  to[0] = first, to[s.channels] = second;
}

// A block takes a chunk of neighbouring channels, a lane each.
template <int KIND, class T> DEVICE void narrow_sums(const Sums& s) {
  typedef typename Wide<T>::type W;
  __shared__ W parts[2][SUM_ROWS][SUM_COLUMNS + 1];
  const i64 tiles = (s.channels + SUM_COLUMNS - 1) / SUM_COLUMNS, tile = blockIdx.x % tiles, chunk = blockIdx.x / tiles;
  const i64 channel = tile * SUM_COLUMNS + threadIdx.x, share = (s.outer + s.chunks - 1) / s.chunks, end = min(s.outer, (chunk + 1) * share);
  const i64 group = KIND == ROW_GRADIENTS ? channel / (s.channels / s.groups) : 0;
  W first = W(0), second = W(0);
  if (channel < s.channels)
#pragma unroll 4
    for (i64 outer = chunk * share + threadIdx.y; outer < end; outer += SUM_ROWS)
      for (i64 i = 0; i < s.each; ++i)
        add_to<KIND, T>(s, (outer * s.channels + channel) * s.each + i, statistics<KIND>(s, outer, channel, group), first, second);
  parts[0][threadIdx.y][threadIdx.x] = first, parts[1][threadIdx.y][threadIdx.x] = second;
  __syncthreads();
  if (threadIdx.y || channel >= s.channels) return;
  for (int i = 1; i < SUM_ROWS; ++i) first += parts[0][i][threadIdx.x], second += parts[1][i][threadIdx.x];
  W* to = (W*)s.partial + chunk * 2 * s.channels + channel;
  to[0] = first, to[s.channels] = second;
}

struct Finish {
  u64 partial, to, first, second;  // to: W[2, channels] or 0; first, second: results or 0
  i64 channels, chunks, count, kind;
  f64 eps;
};

template <class T> DEVICE void finish(const Finish& f) {
  typedef typename Wide<T>::type W;
  const i64 channel = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= f.channels) return;
  W first = W(0), second = W(0);
  for (i64 chunk = 0; chunk < f.chunks; ++chunk) {
    const W* from = (const W*)f.partial + chunk * 2 * f.channels + channel;
    first += from[0], second += from[f.channels];
  }
  if (f.kind <= VARIANCE) first /= (W)f.count;
  if (f.first) ((T*)f.first)[channel] = narrow<T>(first);
  if (f.second) ((T*)f.second)[channel] = narrow<T>(second);
  if (!f.to) return;
  ((W*)f.to)[channel] = f.kind == VARIANCE ? rsqrt(first + (W)f.eps) : first;
  if (f.kind >= GRADIENTS) ((W*)f.to)[f.channels + channel] = second;
}

struct Apply {
  u64 grad, x, y, stats, weight, bias;  // stats: W[4, channels]: mean, factor, and the sums of gradients times what was scaled, and of gradients
  i64 size, channels, each, count;
};

template <bool IS_GRAD, class T> DEVICE void apply(const Apply& a) {
  typedef typename Wide<T>::type W;
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.size) return;
  const i64 row = a.size <= 0x7fffffffll ? (i64)((u32)i / (u32)a.each) : i / a.each;
  const i64 channel = a.size <= 0x7fffffffll ? (i64)((u32)row % (u32)a.channels) : row % a.channels;
  const W* stats = (const W*)a.stats + channel;
  const W factor = stats[a.channels], scaled = ((W)widen(((const T*)a.x)[i]) - stats[0]) * factor;
  const W weight = a.weight ? (W)widen(((const T*)a.weight)[channel]) : W(1);
  W made;
  if constexpr (IS_GRAD) {
    const W grad = (W)widen(((const T*)a.grad)[i]);
    made = (grad - stats[3 * a.channels] / (W)a.count - scaled * (stats[2 * a.channels] / (W)a.count)) * factor * weight;
  } else made = scaled * weight + (a.bias ? (W)widen(((const T*)a.bias)[channel]) : W(0));
  ((T*)a.y)[i] = narrow<T>(made);
}

struct SoftmaxGrads {
  u64 grad, y, to;
  i64 rows, length, width, inner, tiles;
};

template <bool LOG, class T, class W> DEVICE W softmax_term(T grad, T y) { return LOG ? (W)widen(grad) : (W)widen(grad) * (W)widen(y); }
template <bool LOG, class T, class W> DEVICE T softmax_slope(T grad, T y, W total) {
  if constexpr (LOG) return narrow<T>((W)widen(grad) - exponential<T>((W)widen(y)) * total);
  else return narrow<T>(((W)widen(grad) - total) * (W)widen(y));
}

// Each row is read twice. A thread writes what it alone reads, after the whole row was added up: `to` may be one of the operands.
template <bool LOG, class T, int N> DEVICE void softmax_rows(const SoftmaxGrads& s) {
  typedef typename Wide<T>::type W;
  typedef Pack<T, N> P;
  __shared__ W parts[32];
  const int width = (int)s.width;
  int lane;
  i64 row = row_of(width, lane);
  const bool is_row = row < s.rows;
  row = min(row, s.rows - 1);
  const i64 packs = s.length / N;
  const P *grad = (const P*)((const T*)s.grad + row * s.length), *y = (const P*)((const T*)s.y + row * s.length);
  W total = W(0);
#pragma unroll 4
  for (i64 i = lane; i < packs; i += width) {
    const P of_grad = grad[i], of_y = y[i];
#pragma unroll
    for (int n = 0; n < N; ++n) total += softmax_term<LOG, T, W>(of_grad.v[n], of_y.v[n]);
  }
  total = across<Sum>(total, width, parts);
  if (!is_row) return;
  P* to = (P*)((T*)s.to + row * s.length);
#pragma unroll 2
  for (i64 i = lane; i < packs; i += width) {
    const P of_grad = grad[i], of_y = y[i];
    P made;
#pragma unroll
    for (int n = 0; n < N; ++n) made.v[n] = softmax_slope<LOG, T, W>(of_grad.v[n], of_y.v[n], total);
    to[i] = made;
  }
}

// [rows, length, inner], of which a block takes the columns of one tile: neighbouring threads neighbouring columns, and the threads of one x all elements of one.
template <bool LOG, class T, int N> DEVICE void softmax_columns(const SoftmaxGrads& s) {
  typedef typename Wide<T>::type W;
  typedef Pack<T, N> P;
  __shared__ W parts[COLUMN_THREADS][N];
  const i64 tile = blockIdx.x % s.tiles, column = (tile * blockDim.x + threadIdx.x) * N;
  const bool is_inside = column < s.inner;
  const i64 first = blockIdx.x / s.tiles * s.length * s.inner + (is_inside ? column : 0);
  const T *grad = (const T*)s.grad + first, *y = (const T*)s.y + first;
  W total[N];
#pragma unroll
  for (int n = 0; n < N; ++n) total[n] = W(0);
#pragma unroll 4
  for (i64 i = threadIdx.y; i < s.length; i += blockDim.y) {
    const P of_grad = *(const P*)(grad + i * s.inner), of_y = *(const P*)(y + i * s.inner);
#pragma unroll
    for (int n = 0; n < N; ++n) total[n] += softmax_term<LOG, T, W>(of_grad.v[n], of_y.v[n]);
  }
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
  for (int half = blockDim.y / 2; half; half /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) parts[place][n] = total[n];
    __syncthreads();
    // All threads add one of the other half, so that all have the whole in the end.
    const int other = (threadIdx.y ^ half) * blockDim.x + threadIdx.x;
#pragma unroll
    for (int n = 0; n < N; ++n) total[n] += parts[other][n];
    __syncthreads();
  }
  if (!is_inside) return;
  T* to = (T*)s.to + first;
#pragma unroll 2
  for (i64 i = threadIdx.y; i < s.length; i += blockDim.y) {
    const P of_grad = *(const P*)(grad + i * s.inner), of_y = *(const P*)(y + i * s.inner);
    P made;
#pragma unroll
    for (int n = 0; n < N; ++n) made.v[n] = softmax_slope<LOG, T, W>(of_grad.v[n], of_y.v[n], total[n]);
    *(P*)(to + i * s.inner) = made;
  }
}

#define TRAIN(name, threads, Parameters, call) \
  extern "C" __global__ void __launch_bounds__(threads) training_##name(const __grid_constant__ Parameters p) { call(p); }
#define TRAIN_SOFTMAX(name, LOG, T)                                                                            \
  TRAIN(name##_rows_packed_##T, 512, SoftmaxGrads, (softmax_rows<LOG, T, Lanes<T>::count>))                    \
  TRAIN(name##_rows_single_##T, 512, SoftmaxGrads, (softmax_rows<LOG, T, 1>))                                  \
  TRAIN(name##_columns_packed_##T, COLUMN_THREADS, SoftmaxGrads, (softmax_columns<LOG, T, Lanes<T>::count>))   \
  TRAIN(name##_columns_single_##T, COLUMN_THREADS, SoftmaxGrads, (softmax_columns<LOG, T, 1>))
#define TRAINING(T)                                                                         \
  TRAIN(rows_layer_packed_##T, 512, RowGrads, (row_grads<true, false, T, Lanes<T>::count>)) \
  TRAIN(rows_layer_single_##T, 512, RowGrads, (row_grads<true, false, T, 1>))               \
  TRAIN(rows_rms_packed_##T, 512, RowGrads, (row_grads<false, false, T, Lanes<T>::count>))  \
  TRAIN(rows_rms_single_##T, 512, RowGrads, (row_grads<false, false, T, 1>))                \
  TRAIN(rows_group_packed_##T, 512, RowGrads, (row_grads<true, true, T, Lanes<T>::count>))  \
  TRAIN(rows_group_single_##T, 512, RowGrads, (row_grads<true, true, T, 1>))                \
  TRAIN_SOFTMAX(exp, false, T) TRAIN_SOFTMAX(log, true, T)                                  \
  TRAIN(mean_wide_##T, 256, Sums, (wide_sums<MEAN, T>))                                     \
  TRAIN(mean_narrow_##T, 256, Sums, (narrow_sums<MEAN, T>))                                 \
  TRAIN(variance_wide_##T, 256, Sums, (wide_sums<VARIANCE, T>))                             \
  TRAIN(variance_narrow_##T, 256, Sums, (narrow_sums<VARIANCE, T>))                         \
  TRAIN(gradients_wide_##T, 256, Sums, (wide_sums<GRADIENTS, T>))                           \
  TRAIN(gradients_narrow_##T, 256, Sums, (narrow_sums<GRADIENTS, T>))                       \
  TRAIN(rowgradients_wide_##T, 256, Sums, (wide_sums<ROW_GRADIENTS, T>))                    \
  TRAIN(rowgradients_narrow_##T, 256, Sums, (narrow_sums<ROW_GRADIENTS, T>))                \
  TRAIN(finish_##T, 256, Finish, (finish<T>))                                               \
  TRAIN(apply_##T, 256, Apply, (apply<false, T>))                                           \
  TRAIN(unapply_##T, 256, Apply, (apply<true, T>))
