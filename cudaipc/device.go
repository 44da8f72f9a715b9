// Package cudaipc is the contract of the devices that reach memory and events of other processes.
// They import an engine's regions, ask its events and words, and copy between the regions and the
// pool's arena. The package also has what every device is made of: peers with their regions,
// checks, and tickets. The devices are in the packages below.
package cudaipc

import (
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// RegionID names a region of a peer, which chooses it.
type RegionID uint32

// Kind is how a region is reached. The numbers are those of the session protocol.
type Kind uint8

// The kinds of regions.
const (
	KindFD     Kind = 1 // a file descriptor to map: memfd (host)
	KindPeer   Kind = 2 // an address range of the peer's process, by process_vm_readv (host)
	KindCUDA   Kind = 3 // a CUDA IPC memory handle
	KindCUDAFD Kind = 4 // a POSIX fd of CUDA virtual memory
)

// Region is a stretch of a peer's memory. CUDA virtual memory comes in pieces: consecutive
// elements of KindCUDAFD with one ID are one region, mapped side by side in their order.
type Region struct {
	ID     RegionID
	Kind   Kind
	Size   uint64 // bytes; of the piece
	FD     int    // KindFD, KindCUDAFD: owned by the device from the call of Import on, also when it fails
	Addr   uint64 // KindPeer: start address in the peer. KindCUDA: where the region begins in its allocation, bytes
	Handle []byte // KindCUDA: 64 bytes. Regions of one allocation have the same
}

// UUID names a GPU, or a MIG instance of one, on every node; an ordinal does not.
type UUID [16]byte

// String returns the UUID as NVIDIA's tools print that of a GPU.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Import is a request to open regions of one peer, all or none.
type Import struct {
	Pid     int  // the peer's process, as the kernel named it (SO_PEERCRED); needed for KindPeer
	GPU     UUID // where all regions of KindCUDA and KindCUDAFD are; zero if there are none
	Regions []Region
	// Proof is a descriptor that a process keeps open until it has closed the regions. The end of
	// its last copy proves that no process touches them any more. 0 is none. It is owned by the
	// device from the call of Import on, also when Import fails.
	Proof int
	// Sync is where the peer's step word, events and revocation words are; zero: none.
	Sync *Sync
	// Cancelled is closed when the peer dies or its session ends. An Import in flight that may take
	// long then fails within 2 s, with nothing open. Nil: never. It is not sent to other processes.
	Cancelled <-chan struct{} `json:"-"`
	// Lost is called, once, when the process that has the regions died, or was killed because it
	// hung: all copies of the peer have ended, with Bad blocks, and all calls of it answer
	// ErrPeer. It must still be closed. Nil: not told. It is not sent to other processes.
	Lost func(error) `json:"-"`
}

// CheckCancelled returns an error if the import is cancelled.
func (im *Import) CheckCancelled() error {
	select {
	case <-im.Cancelled:
		return fmt.Errorf("%w: its import is cancelled", ErrPeer)
	default:
		return nil
	}
}

// Sync places a peer's words in a region of KindFD. Words are little-endian and naturally
// aligned. Where the peer's memory is a GPU's, an event's cell is CUDAEventCell bytes: the handle
// of an interprocess event, which Import reads once.
type Sync struct {
	Region    RegionID
	StepOff   uint64 // one u64: the last step whose kernels have ended
	EventsOff uint64 // Events cells of EventCell bytes
	Events    uint32
	RevokeOff uint64 // Revokes words of 4 bytes: not 0 is revoked
	Revokes   uint32
}

// EventCell is the size of a host event: u64 recorded, u64 fired. An event has fired when fired
// >= recorded; as in CUDA, an event that was never recorded counts as fired.
const EventCell = 16

// CUDAEventCell is the size of a CUDA IPC event handle.
const CUDAEventCell = 64

// None stands for no event or no revocation word.
const None = ^uint32(0)

// Wait asks for a peer's step word, one event and one revocation word.
type Wait struct {
	Event  uint32 // index, or None: counts as fired
	Revoke uint32 // index, or None: counts as not revoked
	// Step is the awaited step; 0 is any. While the step word is lower, a device may answer that
	// the event has not fired without asking it: the word is read without the driver, the event
	// is not.
	Step uint64
}

// State is the answer to a Wait. Fired alone proves nothing: an event may fire because its
// process died.
type State struct {
	Step    uint64
	Fired   bool
	Revoked bool
}

// Direction of a copy.
type Direction uint8

// The directions.
const (
	Gather  Direction = 0 // regions to arena: a save
	Scatter Direction = 1 // arena to regions: a load
)

// Run is one contiguous stretch.
type Run struct {
	Region    RegionID
	RegionOff uint64
	ArenaOff  int64
	Len       uint32
}

// Block is the runs of one block in the order of its bytes, and the seed of its checksum.
type Block struct {
	Runs uint32 // how many of Copy.Runs, after those of the blocks before it
	Seed uint32
}

// Copy is a batch of blocks. Copies of one peer and one direction happen in the order of
// submission; other copies have no order among each other. The device may read Runs and Blocks
// until the copy is done.
type Copy struct {
	Dir    Direction
	Sum    bool // make a CRC-32C of each block's bytes, as pool.Sum does
	Runs   []Run
	Blocks []Block
}

// Ticket waits up to timeout for a submitted copy to end; ok is false if it has not. With timeout 0
// or less it does not wait.
type Ticket func(timeout time.Duration) (d Done, ok bool, err error)

// Done is a finished copy. Its bytes have arrived, and nothing of it is in flight any more.
type Done struct {
	Sums []uint32 // one per block, if asked for
	Bad  []bool   // nil, or one per block: its bytes did not (all) arrive
	Err  error    // why some are bad
	// SumTime is how much later than the last byte the last sum was there.
	SumTime time.Duration
}

// Device opens engines' memory, and copies between that and one arena. It is message-shaped
// (offsets, no pointers), so that it can live in another process. All methods of it and of its
// peers may run at once.
type Device interface {
	// Import opens regions. An error names the region and the reason; nothing stays open.
	Import(Import) (Peer, error)
	// Close frees the device. It returns ErrBusy while a peer is open.
	Close() error
}

// Peer is the memory of an engine worker: its regions are opened and closed as one. After Close all
// calls return ErrPeer. Copy and Poll never wait for the engine.
type Peer interface {
	// Poll answers a wait now.
	Poll(w Wait) (State, error)
	// Copy checks and starts a copy, asynchronously. It touches only imported regions and the
	// arena: a run outside of them is ErrRange, and nothing is copied.
	Copy(*Copy) (Ticket, error)
	// Sum checks and starts a sample, asynchronously; its ticket returns a CRC-32C for each
	// block of Seed and the bytes of its pieces in order. It is to verify copies, and shares
	// nothing with Copy that could make both wrong: addresses are computed from Pieces, and the
	// memory is read with plain reads where it is, not through the arena. A piece outside of the
	// imported regions is ErrRange. A sample counts as a copy: while it is in flight, Close is
	// ErrBusy. It ends within Sample.Within and the time of one read of at most 256 KiB: Done.Bad
	// has the blocks without a sum, and those of a peer that died.
	Sum(*Sample) (Ticket, error)
	// SetWord writes the word of 8 bytes at off of the sync region, off a multiple of 8, by which
	// the engine learns what has arrived in its memory. A reader of the word then sees the bytes of
	// all copies whose end was reported before.
	SetWord(off, value uint64) error
	// Close closes every region. It returns ErrBusy while a copy is in flight. Afterwards no byte
	// of them is touched.
	Close() error
}

// Errors to branch on.
var (
	ErrPeer  = errors.New("the peer is not open")
	ErrRange = errors.New("outside of the imported regions or the arena")
	ErrBusy  = errors.New("in use")
	ErrKind  = errors.New("this device cannot open such a region")
	// ErrLost is a driver error that no later call survives: only the end of the process ends its
	// copies.
	ErrLost   = errors.New("the device is lost")
	ErrNoCUDA = errors.New("no CUDA") // wrapped with why: not built in, no driver, no GPU, not this GPU
)
