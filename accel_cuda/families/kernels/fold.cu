// Reductions along any axes, by a state that takes one element after the other and that is merged with others.

constexpr int FOLD_DIMS = 8, FOLD_THREADS = 256;
// The one infinity of a type.
template <class W> DEVICE W infinity() { return W(1) / W(0); }

template <class W> struct Held { W value; };
struct FoldSum {
  template <class W> using State = Held<W>;
  template <class W> static DEVICE Held<W> none() { return Held<W>{}; }
  template <class W> static DEVICE void take(Held<W>& s, W x, i64) { s.value = add(s.value, x); }
  template <class W> static DEVICE void merge(Held<W>& s, const Held<W>& t) { s.value = add(s.value, t.value); }
  template <class U, class W> static DEVICE U result(const Held<W>& s, i64, i64) { return narrow<U>(s.value); }
};
struct FoldMean : FoldSum {
  template <class U, class W> static DEVICE U result(const Held<W>& s, i64 length, i64) {
    if constexpr (Kind<W>::complex) return U{s.value.re / length, s.value.im / length};
    else return narrow<U>(s.value / (W)length);
  }
};
struct FoldProd {
  template <class W> using State = Held<W>;
  template <class W> static DEVICE Held<W> none() { return Held<W>{W(1)}; }
  template <class W> static DEVICE void take(Held<W>& s, W x, i64) { s.value = mul(s.value, x); }
  template <class W> static DEVICE void merge(Held<W>& s, const Held<W>& t) { s.value = mul(s.value, t.value); }
  template <class U, class W> static DEVICE U result(const Held<W>& s, i64, i64) { return narrow<U>(s.value); }
};
struct FoldAny {
  template <class W> using State = Held<bool>;
  template <class W> static DEVICE Held<bool> none() { return Held<bool>{false}; }
  template <class W> static DEVICE void take(Held<bool>& s, W x, i64) { s.value = s.value || x != W(0); }
  template <class W> static DEVICE void merge(Held<bool>& s, const Held<bool>& t) { s.value = s.value || t.value; }
  template <class U, class W> static DEVICE U result(const Held<bool>& s, i64, i64) { return narrow<U>(s.value); }
};
struct FoldAll {
  template <class W> using State = Held<bool>;
  template <class W> static DEVICE Held<bool> none() { return Held<bool>{true}; }
  template <class W> static DEVICE void take(Held<bool>& s, W x, i64) { s.value = s.value && x != W(0); }
  template <class W> static DEVICE void merge(Held<bool>& s, const Held<bool>& t) { s.value = s.value && t.value; }
  template <class U, class W> static DEVICE U result(const Held<bool>& s, i64, i64) { return narrow<U>(s.value); }
};

// The first element of all that no other goes before, and its index; a NaN goes before all numbers.
template <class W> struct Place { W value; i64 index; };
template <bool is_max> struct FoldPlace {
  template <class W> using State = Place<W>;
  template <class W> static DEVICE Place<W> none() { return Place<W>{W(0), -1}; }
  template <class W> static DEVICE bool is_before(W a, W b) {
    if (a != a) return b == b;
    return is_max ? a > b : a < b;
  }
  // Of a thread's elements the later ones have higher indices.
  template <class W> static DEVICE void take(Place<W>& s, W x, i64 index) {
    if (s.index < 0 || is_before(x, s.value)) s = Place<W>{x, index};
  }
  template <class W> static DEVICE void merge(Place<W>& s, const Place<W>& t) {
    if (t.index < 0) return;
    if (s.index < 0 || is_before(t.value, s.value) || (!is_before(s.value, t.value) && t.index < s.index)) s = t;
  }
};
template <bool is_max> struct FoldExtreme : FoldPlace<is_max> {
  template <class U, class W> static DEVICE U result(const Place<W>& s, i64, i64) { return narrow<U>(s.value); }
};
template <bool is_max> struct FoldIndex : FoldPlace<is_max> {
  template <class U, class W> static DEVICE U result(const Place<W>& s, i64, i64) { return s.index; }
};
typedef FoldExtreme<true> FoldMax;
typedef FoldExtreme<false> FoldMin;
typedef FoldIndex<true> FoldArgmax;
typedef FoldIndex<false> FoldArgmin;

// Welford's mean and sum of squared deviations, merged as Chan has it.
template <class W> struct Spread { W count, mean, squares; };
struct FoldVar {
  template <class W> using State = Spread<W>;
  template <class W> static DEVICE Spread<W> none() { return Spread<W>{W(0), W(0), W(0)}; }
  template <class W> static DEVICE void take(Spread<W>& s, W x, i64) {
    s.count += W(1);
    const W off = x - s.mean;
    s.mean += off / s.count;
    s.squares += off * (x - s.mean);
  }
  template <class W> static DEVICE void merge(Spread<W>& s, const Spread<W>& t) {
    if (t.count == W(0)) return;
    const W count = s.count + t.count, off = t.mean - s.mean, share = t.count / count;
    s.mean += off * share;
    s.squares += t.squares + off * off * s.count * share;
    s.count = count;
  }
  template <class W> static DEVICE W variance(const Spread<W>& s, i64 length, i64 ddof) { return s.squares / (W)max(length - ddof, 0ll); }
  template <class U, class W> static DEVICE U result(const Spread<W>& s, i64 length, i64 ddof) { return narrow<U>(variance(s, length, ddof)); }
};
struct FoldStd : FoldVar {
  template <class U, class W> static DEVICE U result(const Spread<W>& s, i64 length, i64 ddof) { return narrow<U>(sqrt(variance(s, length, ddof))); }
};

// The largest element, and the sum of all exponentials divided by its own.
template <class W> struct Exponents { W most, sum; };
struct FoldLogsumexp {
  template <class W> using State = Exponents<W>;
  template <class W> static DEVICE Exponents<W> none() { return Exponents<W>{-infinity<W>(), W(0)}; }
  template <class W> static DEVICE void take(Exponents<W>& s, W x, i64) { merge<W>(s, Exponents<W>{x, W(1)}); }
  template <class W> static DEVICE void merge(Exponents<W>& s, const Exponents<W>& t) {
    if (t.most == s.most) s.sum += t.sum;
    else if (t.most > s.most) s.sum = s.sum * exp(s.most - t.most) + t.sum, s.most = t.most;
    else s.sum += t.sum * exp(t.most - s.most);
  }
  template <class U, class W> static DEVICE U result(const Exponents<W>& s, i64, i64) { return narrow<U>(s.most + log(s.sum)); }
};

// Several elements of one thread. Element k has the index first + k / PER * step + k % PER.
template <class F> struct Several {
  template <int PER, class S, class W, int N> static DEVICE void take(S& s, const W (&x)[N], i64 first, i64 step) {
#pragma unroll
    for (int k = 0; k < N; ++k) F::template take<W>(s, x[k], first + k / PER * step + k % PER);
  }
};
// Their own mean and squared deviations, then one division for all of them.
struct SeveralSpread {
  template <int PER, class W, int N> static DEVICE void take(Spread<W>& s, const W (&x)[N], i64, i64) {
    Spread<W> all = {W(N), W(0), W(0)};
#pragma unroll
    for (int k = 0; k < N; ++k) all.mean += x[k];
    all.mean *= W(1) / W(N);
#pragma unroll
    for (int k = 0; k < N; ++k) all.squares += (x[k] - all.mean) * (x[k] - all.mean);
    FoldVar::merge<W>(s, all);
  }
};
template <> struct Several<FoldVar> : SeveralSpread {};
template <> struct Several<FoldStd> : SeveralSpread {};
// One exponential for each; an infinity less itself is no number.
template <> struct Several<FoldLogsumexp> {
  template <int PER, class W, int N> static DEVICE void take(Exponents<W>& s, const W (&x)[N], i64, i64) {
    Exponents<W> all = {x[0], W(0)};
#pragma unroll
    for (int k = 1; k < N; ++k) all.most = larger(all.most, x[k]);
#pragma unroll
    for (int k = 0; k < N; ++k) all.sum += x[k] == all.most ? W(1) : exp(x[k] - all.most);
    FoldLogsumexp::merge<W>(s, all);
  }
};

// Sizes are in elements. A block folds a chunk of the elements of some results; threads that share a result are neighbours where its elements are.
struct Fold {
  u64 x, y, states;  // states: where chunks leave theirs
  i64 results, length, chunk, ddof, width, are_neighbours, packs;  // packs: whether elements lie together, and can be taken 16 bytes at a time
  i64 kept_dims, kept_lengths[FOLD_DIMS], kept_strides[FOLD_DIMS];
  i64 folded_dims, folded_lengths[FOLD_DIMS], folded_strides[FOLD_DIMS];
};

template <class I> DEVICE i64 offset_of(I i, i64 dims, const i64* lengths, const i64* strides) {
  i64 at = 0;
#pragma unroll 1
  for (int d = (int)dims - 1; d > 0; --d) {
    const I next = i / (I)lengths[d];
    at += (i64)(i - next * (I)lengths[d]) * strides[d];
    i = next;
  }
  return at + (i64)i * strides[0];
}
DEVICE i64 offset_in(i64 i, i64 size, i64 dims, const i64* lengths, const i64* strides) {
  if (dims == 1) return i * strides[0];
  return size <= 0x7fffffffll ? offset_of((u32)i, dims, lengths, strides) : offset_of((u64)i, dims, lengths, strides);
}

template <class F, class W> DEVICE void merge_lanes(typename F::template State<W>& state, u32 lane, u32 width, u32 step) {
  __shared__ alignas(16) char storage[FOLD_THREADS * sizeof(state)];
  auto* states = (typename F::template State<W>*)storage;
  states[threadIdx.x] = state;
  for (u32 half = width / 2; half; half /= 2) {
    __syncthreads();
    if (lane < half) F::template merge<W>(states[threadIdx.x], states[threadIdx.x + half * step]);
  }
  state = states[threadIdx.x];
}

// Folds what one of the threads takes that share a result, with several loads in flight.
template <class F, class T, class S> DEVICE void fold_run(const Fold& f, S& state, const T* x, i64 first, i64 last, u32 lane, i64 width) {
  typedef typename Wide<T>::type W;
  i64 i = first + lane;
  if (f.packs) {
    constexpr int P = Lanes<T>::count, N = P < 16 ? 4 : 2;
    const i64 whole = last - (last - first) % P;
    for (i = first + (i64)lane * P; i + (N - 1) * width * P < whole; i += N * width * P) {
      Pack<T, P> packs[N];
      W values[N * P];
#pragma unroll
      for (int k = 0; k < N; ++k) packs[k] = load_whole<T>(x + i + k * width * P);
#pragma unroll
      for (int k = 0; k < N * P; ++k) values[k] = widen(packs[k / P].v[k % P]);
      Several<F>::template take<P>(state, values, i, width * P);
    }
    for (; i < whole; i += width * P) {
      const Pack<T, P> pack = load_whole<T>(x + i);
      W values[P];
#pragma unroll
      for (int k = 0; k < P; ++k) values[k] = widen(pack.v[k]);
      Several<F>::template take<P>(state, values, i, 1);
    }
    i = whole + lane;
  } else if (f.folded_dims == 1) {
    constexpr int N = 8;
    const i64 stride = f.folded_strides[0];
    for (; i + (N - 1) * width < last; i += N * width) {
      W values[N];
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = widen(x[(i + k * width) * stride]);
      Several<F>::template take<1>(state, values, i, width);
    }
  }
  for (; i < last; i += width) F::template take<W>(state, widen(x[offset_in(i, f.length, f.folded_dims, f.folded_lengths, f.folded_strides)]), i);
}

template <class F, class T, class U> DEVICE void fold(const Fold& f) {
  typedef typename Wide<T>::type W;
  typedef typename F::template State<W> State;
  const u32 width = (u32)f.width, per_block = FOLD_THREADS / width;
  const u32 lane = f.are_neighbours ? threadIdx.x % width : threadIdx.x / per_block;
  const i64 result = (i64)blockIdx.x * per_block + (f.are_neighbours ? threadIdx.x / width : threadIdx.x % per_block);
  const i64 first = (i64)blockIdx.y * f.chunk, last = min(first + f.chunk, f.length);
  State state = F::template none<W>();
  if (result < f.results) {
    const T* x = (const T*)f.x + offset_in(result, f.results, f.kept_dims, f.kept_lengths, f.kept_strides);
    fold_run<F>(f, state, x, first, last, lane, width);
  }
  merge_lanes<F, W>(state, lane, width, f.are_neighbours ? 1 : per_block);
  if (lane == 0 && result < f.results) {
    if (gridDim.y > 1) ((State*)f.states)[(i64)blockIdx.y * f.results + result] = state;
    else ((U*)f.y)[result] = F::template result<U, W>(state, f.length, f.ddof);
  }
}
// A block merges the states of one result's chunks.
template <class F, class T, class U> DEVICE void unite(const Fold& f) {
  typedef typename Wide<T>::type W;
  typedef typename F::template State<W> State;
  const i64 result = blockIdx.x, chunks = (f.length + f.chunk - 1) / f.chunk;
  State state = F::template none<W>();
  for (i64 i = threadIdx.x; i < chunks; i += FOLD_THREADS) F::template merge<W>(state, ((const State*)f.states)[i * f.results + result]);
  merge_lanes<F, W>(state, threadIdx.x, FOLD_THREADS, 1);
  if (threadIdx.x == 0) ((U*)f.y)[result] = F::template result<U, W>(state, f.length, f.ddof);
}

#define FOLD(name, F, T, U)                                                                                                     \
  extern "C" __global__ void __launch_bounds__(256) fold_##name##_##T(const __grid_constant__ Fold f) { fold<Fold##F, T, U>(f); } \
  extern "C" __global__ void __launch_bounds__(256) fold_##name##_##T##_end(const __grid_constant__ Fold f) { unite<Fold##F, T, U>(f); }
