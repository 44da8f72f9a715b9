package proof

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// sizes are the parameters of the measurements.
type sizes struct {
	region int64 // bytes of one region of an engine, and of the arena
	open   int64 // bytes of each of two regions whose import is timed
	piece  int64 // bytes of a piece of virtual memory
	pin    int64 // bytes to pin
	rounds int   // of copies; the median counts
	loops  int   // of the compute loop
	fill   int64 // bytes of the kernel in it
}

var (
	fullSizes = sizes{
		region: 512 << 20,
		open:   120 << 20,
		piece:  20 << 20,
		pin:    10 << 30,
		rounds: 7,
		loops:  2000,
		fill:   64 << 20,
	}
	quickSizes = sizes{
		region: 8 << 20,
		open:   8 << 20,
		piece:  2 << 20,
		pin:    32 << 20,
		rounds: 2,
		loops:  40,
		fill:   1 << 20,
	}
)

// Limits of a check.
const (
	lookEvery    = time.Millisecond       // between looks at the GPU's free memory, and at events
	backWithin   = 10 * time.Second       // for memory to be back; more is a failure, less than backTarget the target
	backTarget   = 2000                   // ms
	deadEvent    = 2 * time.Second        // an event of a dead process that has not fired by then never will
	settled      = 300 * time.Millisecond // free memory that has not changed for so long is taken as it is
	settleWithin = 10 * time.Second       // then it is taken as it is: others use the GPU
	// slack is how many bytes may be missing afterwards: contexts that stay open grow a little.
	slack = 64 << 20
)

const gib = 1 << 30

// bench is the run of one check. It is a devicetest.T: a failure makes the check fail.
type bench struct {
	ctx   context.Context //nolint:containedctx // of the one check that it lives for
	sizes sizes
	line  *Line

	cleanups []func() // of the part that runs

	mu   sync.Mutex
	errs []error
}

var _ devicetest.T = (*bench)(nil)

// run runs a check to its end, which may be a failure.
func (b *bench) run(check func(*bench)) error {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.part(func() { check(b) })
	}()
	<-ended
	return errors.Join(b.errs...)
}

// part runs f, and closes what f has opened.
func (b *bench) part(f func()) {
	outer := b.cleanups
	b.cleanups = nil
	defer func() {
		for _, end := range slices.Backward(b.cleanups) {
			end()
		}
		b.cleanups = outer
	}()
	f()
}

func (b *bench) Helper()             {}
func (b *bench) Logf(string, ...any) {}
func (b *bench) Cleanup(f func())    { b.cleanups = append(b.cleanups, f) }

func (b *bench) Error(args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.errs = append(b.errs, errors.New(fmt.Sprint(args...)))
}

func (b *bench) Errorf(format string, args ...any) { b.Error(fmt.Sprintf(format, args...)) }

func (b *bench) Fatal(args ...any) {
	b.Error(args...)
	runtime.Goexit()
}

func (b *bench) Fatalf(format string, args ...any) { b.Fatal(fmt.Sprintf(format, args...)) }

func (b *bench) Failed() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.errs) > 0
}

// closes calls f at the end of the part, and makes the check fail with its error.
func (b *bench) closes(f func() error) {
	b.Cleanup(func() {
		if err := f(); err != nil {
			b.Error(err)
		}
	})
}

// must ends the check if there is an error. It is not for what Cleanup calls.
func (b *bench) must(err error) {
	if err != nil {
		b.Fatal(err)
	}
}

// gpu opens the GPU as an agent's mover does, over an arena of size bytes, and waits until that is
// pinned. Copies take one path, if one is named.
func (b *bench) gpu(size int64, path cuda.CopyPath) (devicetest.Fixture, *cuda.Device) {
	f := devicetest.CUDA(b, size, cudaipc.KindCUDA, func(o *cuda.Options) { o.Path = path })
	d := f.Device.(*cuda.Device)
	devicetest.Pinned(b, d)
	b.pinned(d.Info())
	return f, d
}

// pinned ends the check if an arena is not pinned as a whole.
func (b *bench) pinned(i cudaipc.CUDAInfo) {
	if i.PinError != "" {
		b.Fatalf("the driver pinned %d of %d bytes: %s", i.Pinned, i.Arena, i.PinError)
	}
}

// free returns the GPU's free memory once it is stable: the end of a process takes time.
func (b *bench) free(d *cuda.Device) int64 {
	begin := time.Now()
	last, since := d.Info().Free, begin
	for time.Since(since) < settled {
		if time.Since(begin) > settleWithin {
			b.line.Facts["free"] = "the GPU's free memory does not settle: others use it"
			break
		}
		time.Sleep(lookEvery)
		if now := d.Info().Free; now != last {
			last, since = now, time.Now()
		}
	}
	return last
}

// back waits until the GPU has about want bytes free, and reports the time since a death.
func (b *bench) back(d *cuda.Device, want int64, death time.Time) {
	free := d.Info().Free
	for ; free < want-min(slack, b.sizes.region/2); free = d.Info().Free {
		if time.Since(death) > backWithin {
			b.Fatalf("%d bytes are free %v after the death, %d were before", free, backWithin, want)
		}
		time.Sleep(lookEvery)
	}
	ms := float64(time.Since(death)) / float64(time.Millisecond)
	b.line.Figures["back_ms"], b.line.Figures["short_bytes"] = ms, float64(max(want-free, 0))
	b.line.say("its GPU memory was free again %.0f ms after SIGKILL", ms)
	b.line.aim("memory back, ms", ms, backTarget, true)
}
