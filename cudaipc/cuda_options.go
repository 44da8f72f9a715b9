package cudaipc

import "time"

// Limits of a CUDA device.
const (
	MaxCUDAEvents   = 1 << 12          // events of one peer
	MaxCUDAPieces   = 1 << 16          // pieces of virtual memory of one peer
	DefaultPinPiece = 256 << 20        // bytes of the arena that are pinned by one call; a copy of more is several
	DefaultRing     = 32 << 20         // bytes of pinned memory, per direction, for the part of the arena that is not pinned
	DefaultInFlight = 256 << 20        // bytes, per direction, that the GPU has been told to copy and has not yet
	PinPatience     = 10 * time.Second // a call that pins a piece and takes longer is told as a refusal
	MinPinPiece     = 1 << 16          // bytes; a multiple of the page
	MinRing         = 1 << 16          // bytes
)

// CUDAOptions of a CUDA device. Zero stands for the default.
type CUDAOptions struct {
	GPU UUID // zero: the only one that this process sees
	// Arena is mapped memory, not Go's; it stays the caller's, and mapped until Close(AllPeers) has returned. Or it is nil, and the
	// device maps ArenaSize bytes of ArenaFD, a memfd that stays the caller's and may be closed after OpenCUDA.
	Arena     []byte
	ArenaFD   int
	ArenaSize int64

	PinPiece int64      // bytes
	Ring     int64      // bytes
	InFlight int64      // bytes
	Table    *CopyTable // nil: Facts.Table, else that of the GPU's type in Tables, else DefaultCopyTable
	Tables   []CopyTable
	Facts    GPUFacts
	// MeasureKernel lets Calibrate measure the copy kernel too, and name it where it is faster by far.
	MeasureKernel bool
	NoPin         bool // all copies through the rings: for tests of what a refusal to pin leaves
}

// CUDALimits are what kernels of the device's context are given, by the driver's own word, behind the lowering of them: bytes; -1: it
// does not say.
type CUDALimits struct {
	Stack    int64 // of a thread
	Printing int64
	Heap     int64
}

// CUDAInfo is the state of a CUDA device.
type CUDAInfo struct {
	Name    string
	GPU     UUID
	Driver  int    // the newest CUDA that the driver supports, 1000 * major + 10 * minor
	Batch   bool   // the driver has the batch call
	Paths   string // the copy table in one line
	Source  TableSource
	Facts   GPUFacts
	Limits  CUDALimits
	Free    int64 // bytes of the GPU's memory that are free, of Total
	Total   int64
	Imports int64 // allocations, pieces and events of peers that are open

	Arena      int64   // bytes
	Pinned     int64   // of these
	Refused    int64   // bytes that the driver does not pin; their copies go through the rings, and cost more
	PinError   string  // why; it may pass, if a call has not returned for long (PinPatience) and does in the end
	PinDone    bool    // nothing more will be pinned
	PinSeconds float64 // that the pinning has taken, or took in all
	RingBytes  uint64  // copied through the rings so far

	Singles, Batches, Rects, Kernels uint64 // calls so far
	KernelError                      string // why the kernel is not loaded though the table names it; empty: it is, or is not named

	Lost string // why every later call fails; empty: they do not
}
