package arena

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// populatePiece is populated in one call: the longest that Close waits for.
const populatePiece = 64 << 20

// populating gives an arena its (zeroed) pages in the background. The goroutine is the arena's: StopPopulating joins it.
type populating struct {
	stop atomic.Bool
	done sync.WaitGroup
	err  error // valid when done
}

// Populate begins to. Pages that cannot be had are left to probe, which touches those of a stretch one by one and
// counts the ones it retires.
func (a *Arena) Populate(probe func(from, to int64) (bad int)) {
	left, base, p := MaxBadPages, a.base, &a.populating
	p.done.Go(func() {
		for off := 0; off < len(base) && !p.stop.Load(); off += populatePiece {
			to := min(off+populatePiece, len(base))
			err := populate(base[off:to])
			if errors.Is(err, unix.EHWPOISON) || errors.Is(err, unix.EFAULT) {
				if bad := probe(int64(off), int64(to)); bad <= left {
					left, err = left-bad, nil
				}
			}
			if err != nil {
				p.err = fmt.Errorf("dram: populate at %d of %d bytes: %w", off, len(base), err)
				return
			}
			a.ready.Store(int64(to))
		}
	})
}

// populate faults pages in for writing without changing a byte: slots may be in use meanwhile.
func populate(b []byte) error {
	for {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EINVAL): // before Linux 5.14: pages come as they are touched
			return nil
		default:
			return err
		}
	}
}

// Populated returns when the arena is, or will not be any more, and why it was not populated to the end.
func (a *Arena) Populated() error {
	a.populating.done.Wait()
	return a.populating.err
}

// StopPopulating ends it.
func (a *Arena) StopPopulating() {
	a.populating.stop.Store(true)
	a.populating.done.Wait()
}

// Ready is how much is populated.
func (a *Arena) Ready() int64 { return a.ready.Load() }
