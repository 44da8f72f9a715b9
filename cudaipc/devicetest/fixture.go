// Package devicetest checks any cudaipc.Device against its contract, in tests and in a proof on a
// user's GPU. Engines are other processes, so that they can die: this binary, executed again.
package devicetest

import (
	"github.com/kvagent/kvagent/cudaipc"
)

// T is what the suite needs of its caller: *testing.T and *testing.B have it. Fatal and Fatalf end
// the calling goroutine.
type T interface {
	Helper()
	Cleanup(f func())
	Logf(format string, args ...any)
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Failed() bool
}

// Fixture is a device to be tested.
type Fixture struct {
	Device cudaipc.Device
	Arena  []byte // the device's arena as this process sees it, at least MinArena bytes
	// FireOnDeath states whether pending events of a dead process fire on this device.
	FireOnDeath bool
	// Engine starts an engine. An error fails the test; the test's end kills it.
	Engine func(t T, s Spec) Engine
}

// MinArena is the smallest arena that the suite can work with, bytes.
const MinArena = 64 << 20

// Spec of an engine: regions 1, 2, ... of these sizes in bytes, all zero, and its words.
type Spec struct {
	Regions         []int64
	Events, Revokes uint32
	Piece           int64 // of virtual memory; 0: VirtualPiece
}

// Engine is a process whose memory the device imports. It has one stream.
type Engine interface {
	// Import describes everything for one Device.Import, with new descriptors.
	Import() (cudaipc.Import, error)
	// Do carries out one operation in the engine. Only Read and TimeSets have a result.
	Do(Op) ([]byte, error)
	// Kill ends the process at once (SIGKILL) and waits for its end.
	Kill()
}

// Op is one operation of an engine. It is carried out at once, or launched on the engine's stream.
type Op struct {
	Kind   OpKind
	Region cudaipc.RegionID
	Off    int64
	Len    int64
	Data   []byte
	Seed   uint64 // Fill, LaunchFill: the bytes are Pattern(Seed, ...)
	Index  uint32 // Record: event; Revoke, ClearRevoke: word
	Step   uint64
}

// OpKind selects the operation and the fields of an Op that it uses.
type OpKind uint8

// The operations. Those named Launch, Record, SetStep and Hold are on the stream and return at
// once.
const (
	Write       OpKind = iota + 1 // Data to Region at Off
	Read                          // Len bytes of Region at Off
	Fill                          // Pattern(Seed) over Len bytes of Region at Off
	LaunchFill                    // Fill, when the stream reaches it
	Hold                          // the stream waits here until LetGo
	LetGo                         // ends the oldest Hold
	Record                        // event Index
	SetStep                       // the step word
	Synchronize                   // returns when the stream is empty
	Revoke                        // word Index
	ClearRevoke                   // word Index
	// LaunchCopy copies Len bytes of Region at Off to the same place of region Index, when the
	// stream reaches it. It needs a GPU.
	LaunchCopy
	// LaunchSet makes Len bytes of Region at Off repetitions of the 4 bytes of Index, when the
	// stream reaches it: on a GPU by a kernel of the driver. Off and Len are multiples of 4.
	LaunchSet
	// TimeSets carries out LaunchSet Step times, one after the other. The result has the
	// nanoseconds of each, 8 bytes, little-endian.
	TimeSets
)

// Pattern fills p with the bytes that Fill writes at offset off; different seeds or offsets give
// different bytes.
func Pattern(p []byte, seed uint64, off int64) {
	for i := range p {
		at := uint64(off) + uint64(i)
		v := (at>>3 + seed<<40 + 1) * 0x9e3779b97f4a7c15
		v ^= v >> 29
		p[i] = byte(v >> (8 * (at & 7)))
	}
}
