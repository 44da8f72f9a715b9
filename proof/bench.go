package proof

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// sizes are the parameters of the measurements.
type sizes struct {
	region int64 // bytes of one region of an engine, and of the arena
	every  int64 // bytes of a region of which every byte is made and compared: the processor is slow at that
	piece  int64 // bytes of a piece of virtual memory
	raw    int64 // bytes of one raw copy
	pin    int64 // bytes to pin
	rounds int   // of copies; the median counts
	loops  int   // of the compute loop
	fill   int64 // bytes of the kernel in it
	delay  time.Duration
}

var (
	fullSizes = sizes{
		region: 512 << 20,
		every:  128 << 20,
		piece:  20 << 20,
		raw:    256 << 20,
		pin:    10 << 30,
		rounds: 7,
		loops:  2000,
		fill:   64 << 20,
		delay:  300 * time.Millisecond,
	}
	quickSizes = sizes{
		region: 8 << 20,
		every:  8 << 20,
		piece:  2 << 20,
		raw:    2 << 20,
		pin:    32 << 20,
		rounds: 2,
		loops:  40,
		fill:   1 << 20,
		delay:  60 * time.Millisecond,
	}
)

// Limits of a check.
const (
	answerWithin = 2 * time.Minute        // one order to a child
	copyWithin   = 30 * time.Second       // one copy
	lookEvery    = time.Millisecond       // between looks at the GPU's free memory, and at events
	backWithin   = 10 * time.Second       // for memory to be back; more is a failure, less than backTarget the target
	backTarget   = 2000                   // ms
	deadEvent    = 2 * time.Second        // an event of a dead process that has not fired by then never will
	settled      = 300 * time.Millisecond // free memory that has not changed for so long is taken as it is
	settleWithin = 10 * time.Second       // then it is taken as it is: others use the GPU
	// slack is how many bytes may be missing afterwards: contexts that stay open grow a little.
	slack = 64 << 20
)

// bench is the environment of one check. close ends all of it.
type bench struct {
	ctx      context.Context //nolint:containedctx // of the one check that it lives for
	o        *Options
	sizes    sizes
	line     *Line
	device   *cuda.Device
	arena    *arena
	children []*child
	peers    cudaipc.PeerID
}

// arena is memory that a device copies to and from, like the pool's.
type arena struct{ mem []byte }

// errNoPages reports that too few huge pages are free.
var errNoPages = errors.New("no huge pages")

// newArena maps a populated file in memory, as the pool is one, so that pinning does not wait for
// pages.
func newArena(size int64, huge bool) (*arena, error) {
	flags := unix.MFD_CLOEXEC
	if huge {
		flags |= unix.MFD_HUGETLB | unix.MFD_HUGE_2MB
	}
	mem, err := mapFile(size, flags)
	if err != nil {
		err = fmt.Errorf("memory of %d bytes: %w", size, err)
		if huge {
			err = fmt.Errorf("%w: %w", errNoPages, err)
		}
		return nil, err
	}
	return &arena{mem}, nil
}

func mapFile(size int64, flags int) ([]byte, error) {
	fd, err := unix.MemfdCreate("kvagent-proof", flags)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // the mapping keeps the file
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, err
	}
	return unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

func (a *arena) close() { _ = unix.Munmap(a.mem) }

// open opens the GPU over an arena of size bytes, as the agent's mover does, and waits until it
// is pinned.
func (b *bench) open(size int64) error { return b.openWith(size, "") }

// openWith opens the GPU with all copies by one path, if one is named, after closing an open one.
func (b *bench) openWith(size int64, path cuda.CopyPath) (err error) {
	if b.arena == nil {
		if b.arena, err = newArena(size, false); err != nil {
			return err
		}
	}
	if b.device != nil {
		if err := b.device.Close(cudaipc.AllPeers); err != nil {
			return err
		}
		b.device = nil
	}
	if b.device, err = cuda.Open(cuda.Options{Arena: b.arena.mem, Path: path}); err != nil {
		return err
	}
	return b.pinned(b.device)
}

func (b *bench) pinned(d *cuda.Device) error {
	for begin := time.Now(); !d.Info().PinDone; {
		if time.Since(begin) > answerWithin {
			return fmt.Errorf("the arena was not pinned within %v", answerWithin)
		}
		time.Sleep(lookEvery)
	}
	if i := d.Info(); i.PinError != "" {
		return fmt.Errorf("the driver pinned %d of %d bytes: %s", i.Pinned, i.Arena, i.PinError)
	}
	return nil
}

// close ends everything, processes first.
func (b *bench) close() error {
	var err error
	for _, c := range b.children {
		c.kill()
	}
	if b.device != nil {
		err = b.device.Close(cudaipc.AllPeers)
		if errors.Is(err, cudaipc.ErrLost) {
			err = nil // the loss was reported when it happened
		}
	}
	if b.arena != nil {
		b.arena.close()
	}
	return err
}

// engine starts an engine with regions of these sizes.
func (b *bench) engine(virtual bool, sizes ...int64) (*child, error) {
	return b.start(&order{Op: opEngine, Sizes: sizes, Virtual: virtual, Piece: b.sizes.piece})
}

// admit imports an engine's memory and events and returns the peer. withPid tells whether the
// device learns the process.
func (b *bench) admit(c *child, withPid bool) (cudaipc.PeerID, error) {
	b.peers++
	im, err := c.describe(b.peers)
	if err != nil {
		return 0, err
	}
	if !withPid {
		im.Pid = 0
	}
	return b.peers, b.device.Import(im)
}

// move copies n bytes between the start of a region and that of the arena, in one run, and waits.
func (b *bench) move(peer cudaipc.PeerID, dir cudaipc.Direction, region cudaipc.RegionID, n int64) error {
	t, err := b.device.Copy(&cudaipc.Copy{
		Peer: peer, Dir: dir, Runs: []cudaipc.Run{{Region: region, Len: uint32(n)}}, Blocks: []cudaipc.Block{{Runs: 1}},
	})
	if err != nil {
		return err
	}
	return b.done(t)
}

// done waits for a copy, which must end without bad blocks.
func (b *bench) done(t cudaipc.Ticket) error {
	end, ok, err := b.device.Done(t, copyWithin)
	switch {
	case err != nil:
		return err
	case !ok:
		return fmt.Errorf("a copy did not end within %v", copyWithin)
	case end.Bad != nil:
		return fmt.Errorf("blocks did not arrive: %w", end.Err)
	}
	return nil
}

// free returns the GPU's free memory once it is stable: the end of a process takes time.
func (b *bench) free() int64 {
	begin := time.Now()
	last, since := b.device.Info().Free, begin
	for time.Since(since) < settled {
		if time.Since(begin) > settleWithin {
			b.line.Facts["free"] = "the GPU's free memory does not settle: others use it"
			break
		}
		time.Sleep(lookEvery)
		if now := b.device.Info().Free; now != last {
			last, since = now, time.Now()
		}
	}
	return last
}

// back waits until the GPU has about want bytes free, and returns the time since begin.
func (b *bench) back(want int64, begin time.Time) (ms float64, err error) {
	for {
		free := b.device.Info().Free
		if free >= want-min(slack, b.sizes.region/2) {
			b.line.Figures["short_bytes"] = float64(max(want-free, 0))
			return float64(time.Since(begin)) / float64(time.Millisecond), nil
		}
		if time.Since(begin) > backWithin {
			return 0, fmt.Errorf("%d bytes are free %v after the death, %d were before", free, backWithin, want)
		}
		time.Sleep(lookEvery)
	}
}

// self returns the command of the processes that play engines and agents.
func (o *Options) self() []string {
	if len(o.Command) > 0 {
		return o.Command
	}
	return []string{os.Args[0]}
}
