// Streams of random words, as accel.ops.rng defines them: Philox makes each block of four words from its index.

struct Block { u32 w[4]; };

DEVICE Block philox(u64 seed, u64 block, u32 attempt, u32 last = 0) {
  u32 a = (u32)block, b = (u32)(block >> 32), c = attempt, d = last, k = (u32)seed, l = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u64 p = (u64)a * 0xD2511F53u, q = (u64)c * 0xCD9E8D57u;
    a = (u32)(q >> 32) ^ b ^ k;
    c = (u32)(p >> 32) ^ d ^ l;
    b = (u32)q;
    d = (u32)p;
    k += 0x9E3779B9u;
    l += 0xBB67AE85u;
  }
  return Block{{a, b, c, d}};
}

DEVICE u64 pair(const Block& block, int i) { return block.w[2 * i] | (u64)block.w[2 * i + 1] << 32; }
DEVICE double real(u64 bits) { return __longlong_as_double((i64)bits); }

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

template <class D> DEVICE void philox_draw(typename D::type* out, i64 n, u64 seed, u64 offset, D numbers) {
  Writer<D> writer(out, n, seed, offset, numbers);
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

#define DRAW(name, D)                                                                              \
  extern "C" __global__ void name(D::type* out, i64 n, u64 seed, u64 offset, u64 a, u64 b, u64 c) { \
    philox_draw(out, n, seed, offset, D(a, b, c));                                                  \
  }
