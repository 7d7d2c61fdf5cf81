// gla_scan_fp16_k64_v64_saves for host: the chain over chunks.
// Rendered by qla-codegen. Build:
//   python -m ziglang c++ -std=c++20 -O3 -fno-math-errno -ffp-contract=fast -fassociative-math -fno-signed-zeros -fno-trapping-math -ffreestanding -nostdlib -fno-exceptions -fno-rtti -fPIC -shared -o gla_scan_fp16_k64_v64_saves.so gla_scan_fp16_k64_v64_saves.cpp

#define DEV static inline __attribute__((always_inline))
typedef unsigned short u16;
typedef long long i64;
typedef u16 number;  // fp16

DEV float from_fp16(u16 x) { return (float)__builtin_bit_cast(_Float16, x); }
DEV u16 to_number(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
DEV float to_float(u16 x) { return from_fp16(x); }

// ---- arguments: one block; strides in elements
struct Args {
  void* v;
  void* ws_k_out;
  void* ws_q_in;
  void* ws_p;
  void* ws_rows;
  void* cu_seqlens;
  void* initial_state;
  void* final_state;
  void* o;
  void* states;
  i64 v_stride_b;
  i64 v_stride_t;
  i64 v_stride_h;
  i64 v_stride_d;
  i64 o_stride_b;
  i64 o_stride_t;
  i64 o_stride_h;
  i64 initial_stride_n;
  i64 initial_stride_h;
  i64 initial_stride_k;
  i64 initial_stride_v;
  i64 final_stride_n;
  i64 final_stride_h;
  i64 final_stride_k;
  i64 final_stride_v;
  int tokens;
  int value_heads;
  int has_cu_seqlens;
  int cu_is_int64;
};

constexpr int C = 64;  // tokens of a chunk
constexpr int K = 64, V = 64;  // head dims

// A sequence: rows [start, start + length) of batch row `batch`; its chunks use workspace slots from `slot` on.
struct Sequence {
  int batch, start, length, slot;
};
DEV i64 boundary(const Args& args, int n) {
  return args.cu_is_int64 ? ((const i64*)args.cu_seqlens)[n] : ((const int*)args.cu_seqlens)[n];
}
DEV int clamp(i64 x, int low, int high) { return x < low ? low : x > high ? high : (int)x; }
DEV Sequence sequence_at(const Args& args, int n) {
  if (!args.has_cu_seqlens) return {n, 0, args.tokens, n * ((args.tokens + C - 1) / C)};
  const int start = clamp(boundary(args, n), 0, args.tokens), end = clamp(boundary(args, n + 1), start, args.tokens);
  return {0, start, end - start, start / C + n};
}
// The rows of a head, from a token on.
template <class T>
DEV T* rows_of(T* x, int batch, i64 token, int head, i64 stride_b, i64 stride_t, i64 stride_h) {
  return x + batch * stride_b + token * stride_t + head * stride_h;
}

// ---- products: four rows by 64 columns at a time stay in registers
typedef float Vec __attribute__((vector_size(64), aligned(4)));
// d[ROWS][COLUMNS] (+)= sum over i < count(row) of t[row * row_stride + i * inner_stride] * x[i][COLUMNS]
template <bool SET, int ROWS, int COLUMNS, class F>
static void multiply(float* d, const float* t, int row_stride, int inner_stride, const float* x, F count) {
  constexpr int WIDTH = COLUMNS < 64 ? COLUMNS / 16 : 4;
  for (int column = 0; column < COLUMNS; column += 16 * WIDTH)
    for (int row = 0; row < ROWS; row += 4) {
      Vec sum[4][WIDTH];
      for (int r = 0; r < 4; r++)
        for (int c = 0; c < WIDTH; c++) sum[r][c] = SET ? Vec{} : *(const Vec*)(d + (row + r) * COLUMNS + column + 16 * c);
      for (int i = 0; i < count(row + 3); i++)
        for (int r = 0; r < 4; r++)
          for (int c = 0; c < WIDTH; c++)
            sum[r][c] += t[(row + r) * row_stride + i * inner_stride] * *(const Vec*)(x + i * COLUMNS + column + 16 * c);
      for (int r = 0; r < 4; r++)
        for (int c = 0; c < WIDTH; c++) *(Vec*)(d + (row + r) * COLUMNS + column + 16 * c) = sum[r][c];
    }
}

// ---- values of the chain
constexpr int COLUMNS = 64;
DEV float round_(float x) { return to_float(to_number(x)); }
template <int ROWS> struct Block { float x[ROWS][COLUMNS]; };
template <int ROWS> struct Operand { float x[ROWS][COLUMNS]; };  // rounded to fp16
template <int BYTE> struct Shared { const char* address; };
template <int ROWS, int WIDTH> struct Tile { const float* x; };
template <int ROWS, int WIDTH> struct Transposed { const float* x; };
template <int ROWS> struct LowerTile { const float* x; };
template <int ROWS, int WIDTH> DEV Transposed<ROWS, WIDTH> transposed(Tile<ROWS, WIDTH> t) { return {t.x}; }

template <bool SET, int N, int R> DEV void multiply(Block<N>& d, Tile<N, R> t, const Operand<R>& x) {
  multiply<SET, N, COLUMNS>(d.x[0], t.x, R, 1, x.x[0], [](int) { return R; });
}
template <bool SET, int N, int R> DEV void multiply(Block<N>& d, Transposed<R, N> t, const Operand<R>& x) {
  multiply<SET, N, COLUMNS>(d.x[0], t.x, 1, N, x.x[0], [](int) { return R; });
}
template <bool SET, int N> DEV void multiply(Block<N>& d, LowerTile<N> t, const Operand<N>& x) {
  multiply<SET, N, COLUMNS>(d.x[0], t.x, N, 1, x.x[0], [](int row) { return row + 1; });
}
template <int N, int R, class T> DEV void product(Block<N>& d, T t, const Operand<R>& x) { multiply<true>(d, t, x); }
template <int N, int R, class T> DEV void accumulate(Block<N>& d, T t, const Operand<R>& x) { multiply<false>(d, t, x); }
template <int N> DEV void to_operand(Operand<N>& x, const Block<N>& b) {
  for (int r = 0; r < N; r++)
    for (int c = 0; c < COLUMNS; c++) x.x[r][c] = round_(b.x[r][c]);
}
template <int N> DEV void load_operand(Operand<N>& x, Tile<N, COLUMNS> t) { __builtin_memcpy(x.x, t.x, sizeof(x.x)); }
template <int BYTE, int N> DEV void scale_rows(Block<N>& b, Shared<BYTE> v) {
  for (int i = 0; i < N; i++)
    for (int c = 0; c < COLUMNS; c++) b.x[i][c] *= ((const float*)(v.address + BYTE))[i];
}

// ---- tiles of the chunk that landed last
struct Chunk {
  const Args& args;
  Sequence sequence;
  int value_head, n;
  int token() const { return sequence.start + n * C; }
  int rows() const { return sequence.length - n * C < C ? sequence.length - n * C : C; }
  i64 slot() const { return (i64)(sequence.slot + n) * args.value_heads + value_head; }
};
static void land_rows(float* to, int columns, const number* from, i64 stride_t, i64 stride_d, int rows) {
  for (int r = 0; r < C; r++)
    for (int d = 0; d < columns; d++) to[r * columns + d] = r < rows ? to_float(from[r * stride_t + d * stride_d]) : 0.f;
}
static void land_image(float* to, int count, const void* from, i64 slot) {
  for (int i = 0; i < count; i++) to[i] = to_float(((const number*)from)[slot * count + i]);
}

// Kt, Q, V, P, rows
struct Ring_Kt {
  Chunk chunk;
  float Kt_[4096];
  Tile<64, 64> Kt() const { return {Kt_}; }
  float Q_[4096];
  Tile<64, 64> Q() const { return {Q_}; }
  float V_[4096];
  Tile<64, 64> V(int) const { return {V_}; }
  float P_[4096];
  LowerTile<64> P() const { return {P_}; }
  struct Rows {
    const char* address;
    Shared<0> decay() const { return {address}; }
  };
  Rows rows() const { return {(const char*)chunk.args.ws_rows + chunk.slot() * 256}; }
};
static void land(Ring_Kt& ring) {
  Chunk& chunk = ring.chunk;
  const Args& args = chunk.args;
  chunk.n++;
  land_image(ring.Kt_, 4096, args.ws_k_out, chunk.slot());
  land_image(ring.Q_, 4096, args.ws_q_in, chunk.slot());
  land_rows(ring.V_, 64,
            rows_of((const number*)args.v, chunk.sequence.batch, chunk.token(), chunk.value_head, args.v_stride_b, args.v_stride_t, args.v_stride_h),
            args.v_stride_t, args.v_stride_d, chunk.rows());
  land_image(ring.P_, 4096, args.ws_p, chunk.slot());
}
DEV void release(Ring_Kt&) {}  // the next chunk lands when this one is done with

// ---- the chain of a value head of a sequence
static void walk(const Args& args, int n_sequence, int value_head) {
  const Sequence sequence = sequence_at(args, n_sequence);
  const int chunks = (sequence.length + C - 1) / C, stream = 0;
  Ring_Kt ring_Kt{ {args, sequence, value_head, -1} };
  Block<64> S;
  Block<64> O;
  Operand<64> Sr;
  Operand<64> Vr;
  Operand<64> Or;

  auto store_rows = [&](const Operand<C>& x, int n) {
    const int rows = sequence.length - n * C < C ? sequence.length - n * C : C;
    number* o = rows_of((number*)args.o, sequence.batch, sequence.start + n * C, value_head, args.o_stride_b, args.o_stride_t, args.o_stride_h);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < V; c++) o[r * args.o_stride_t + c] = to_number(x.x[r][c]);
  };
  auto save_state = [&](const Block<K>& b, int chunk) {
    const i64 place = (i64)sequence.batch * (args.tokens / C + (args.tokens % C != 0) + 1) + chunk;
    float* to = (float*)args.states + (place * args.value_heads + value_head) * K * V;
    __builtin_memcpy(to, b.x, sizeof(b.x));
  };

  const float* from =
      (const float*)args.initial_state + n_sequence * args.initial_stride_n + value_head * args.initial_stride_h;
  for (int k = 0; k < K; k++)
    for (int v = 0; v < V; v++) S.x[k][v] = args.initial_state ? from[k * args.initial_stride_k + v * args.initial_stride_v] : 0.f;

  for (int n = 0; n < chunks; n++) {
    // the state at the start of the chunk
    save_state(S, n);
    // S rounded
    to_operand(Sr, S);
    // O = Q S
    land(ring_Kt);
    product(O, ring_Kt.Q(), Sr);
    // S = decay S
    scale_rows(S, ring_Kt.rows().decay());
    // V' = V
    load_operand(Vr, ring_Kt.V(stream));
    // O += P V'
    accumulate(O, ring_Kt.P(), Vr);
    // S += Ktᵀ V'
    accumulate(S, transposed(ring_Kt.Kt()), Vr);
    release(ring_Kt);
    // O rounded
    to_operand(Or, O);
    // O to memory
    store_rows(Or, n);
  }
  save_state(S, chunks);
  if (args.final_state) {
    float* to = (float*)args.final_state + n_sequence * args.final_stride_n + value_head * args.final_stride_h;
    for (int k = 0; k < K; k++)
      for (int v = 0; v < V; v++) to[k * args.final_stride_k + v * args.final_stride_v] = S.x[k][v];
  }
}

extern "C" __attribute__((visibility("default"))) void gla_scan_fp16_k64_v64_saves(const Args* args, int begin, int end) {
  for (int block = begin; block < end; block++) walk(*args, block / args->value_heads, block % args->value_heads);
}
