// Philox makes each block of four words of a seed's stream from its index; see accel.ops.rng.

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
