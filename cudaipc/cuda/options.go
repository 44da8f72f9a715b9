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
	DefaultPinPiece = 256 << 20 // bytes of the arena that are pinned by one call; a copy of more is several
	// DefaultRing is the pinned memory per direction for the unpinned part of the arena, bytes.
	DefaultRing = 32 << 20
	MaxPinCall  = 10 * time.Second // a longer call that pins a piece is reported as a refusal
)

// CopyPath is a way to copy between a GPU and pinned memory.
type CopyPath string

// The paths.
const (
	CopySingle CopyPath = "single" // one call per run
	CopyBatch  CopyPath = "batch"  // one call for many runs (CUDA 12.8); single without it
	CopyRect   CopyPath = "rect"   // one call for rows at constant distances
)

// FlatPath is the path of runs that lie anywhere, RowsPath that of runs at constant distances: the
// fastest on an H100 and an H200 for all lengths. The proof's check "paths" says where they are
// not.
const (
	FlatPath = CopyBatch
	RowsPath = CopyRect
)

// Options of a CUDA device. Zero stands for the default.
type Options struct {
	GPU cudaipc.UUID // zero: the only one that this process sees
	// Arena is mapped memory outside of Go's heap. It stays the caller's, and mapped until
	// Device.Close has returned.
	Arena []byte

	PinPiece int64    // bytes, a multiple of the page; it and the next are for tests
	Ring     int64    // bytes
	Path     CopyPath // for all runs that it can copy, in place of FlatPath and RowsPath: for measurements
	NoPin    bool     // all copies go through the rings, as after a refusal: for tests
}
