// Package cuda is the device on a GPU's memory, in this process: it opens what engines export,
// and copies with the GPU's copy engines. Without the build tag cuda it opens no GPU (none.go).
package cuda

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Limits of a CUDA device.
const (
	MaxEvents       = 1 << 12   // events of one peer
	MaxPieces       = 1 << 16   // pieces of virtual memory of one peer
	DefaultPinPiece = 256 << 20 // bytes of the arena that are pinned by one call; a copy of more is several
	// DefaultRing is the pinned memory per direction for the unpinned part of the arena, bytes.
	DefaultRing     = 32 << 20
	DefaultInFlight = 256 << 20        // bytes of copies in flight, per direction
	MaxPinCall      = 10 * time.Second // a longer call that pins a piece is reported as a refusal
	MinPinPiece     = 1 << 16          // bytes; a multiple of the page
	MinRing         = 1 << 16          // bytes
)

// CalibrateWithin is the usual time limit of Calibrate. Tests have a longer one: a software
// driver is as slow as the machine is busy.
const CalibrateWithin = 10 * time.Second

// Options of a CUDA device. Zero stands for the default.
type Options struct {
	GPU cudaipc.UUID // zero: the only one that this process sees
	// Arena is mapped memory outside of Go's heap. It stays the caller's, and mapped until
	// Close(AllPeers) has returned. If it is nil, the device maps ArenaSize bytes of ArenaFD, a
	// memfd that stays the caller's and may be closed after Open.
	Arena     []byte
	ArenaFD   int
	ArenaSize int64

	PinPiece int64              // bytes
	Ring     int64              // bytes
	InFlight int64              // bytes
	Table    *cudaipc.CopyTable // nil: Facts.Table, else that of the GPU's type in Tables, else DefaultCopyTable
	Tables   []cudaipc.CopyTable
	Facts    cudaipc.GPUFacts
	// MeasureKernel lets Calibrate measure the copy kernel too, and name it where it is much
	// faster.
	MeasureKernel bool
	NoPin         bool // all copies go through the rings, as after a refusal: for tests
}

// MaxRawCopy is the most that Raw copies at once, bytes.
const MaxRawCopy = 4 << 30

// RawCopies are the rates of single copies on a GPU, bytes per second.
type RawCopies struct {
	ToHost, ToGPU float64
	Both          float64 // both at once, together
}
