package mooncake

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// readsMemory is what a helper of Reads may use besides the arena, bytes.
const readsMemory = 1 << 30

// readsModule is the module of Reads' helper in the Python package kvagent.
const readsModule = "kvagent.mooncake_reads"

// ReadsOptions are options of Reads. Fields left zero take their default, if one is named.
type ReadsOptions struct {
	Protocol string // "tcp" (the default) or "rdma"
	Devices  string // rdma: names of devices, separated by commas; default: the engine's choice
	Host     string // name or address by which other nodes reach this one
	Arena    Memory // that other nodes may read, and that their memory is read into
	// Concurrency is how many reads the helper works on at once, 1 to MaxConcurrency; default 8.
	Concurrency int
	Python      string   // interpreter of the helper; default "python3"
	Env         []string // of the helper, in addition to this process's: NAME=VALUE
	// SetupWithin bounds the start of a helper, 1 s to 5 min; default 60 s: with RDMA all of the
	// arena is pinned.
	SetupWithin time.Duration
	// Within bounds one read, 100 ms to 10 min; default 4 s. After it the helper is killed.
	Within time.Duration
	// OnState is called when a helper is ready (reason is nil), and when there is none any more, or
	// another reason why there is none. It must not call the Reads. May be nil.
	OnState func(reason error)
}

func (o *ReadsOptions) complete() error {
	remote.Default(&o.Protocol, "tcp")
	remote.Default(&o.Concurrency, 8)
	remote.Default(&o.Python, "python3")
	remote.Default(&o.SetupWithin, time.Minute)
	remote.Default(&o.Within, 4*time.Second)
	if o.OnState == nil {
		o.OnState = func(error) {}
	}
	switch {
	case o.Protocol != "tcp" && o.Protocol != "rdma":
		return fmt.Errorf("mooncake: Protocol is %q, allowed: tcp, rdma", o.Protocol)
	case o.Protocol == "tcp" && o.Devices != "":
		return fmt.Errorf("mooncake: Devices is %q, allowed: none with tcp", o.Devices)
	case len(o.Devices) > MaxText || !textual.MatchString(o.Devices):
		return fmt.Errorf("mooncake: Devices has %d bytes, allowed: at most %d, printable, no blanks", len(o.Devices),
			MaxText)
	case o.Host == "" || len(o.Host) > pool.MaxTarget-len(":65535") || !textual.MatchString(o.Host):
		return fmt.Errorf("mooncake: Host has %d bytes, allowed: 1 to %d, printable, no blanks", len(o.Host),
			pool.MaxTarget-len(":65535"))
	case len(o.Arena.Base) == 0:
		return errors.New("mooncake: Arena must be given")
	}
	return errors.Join(
		remote.Between("mooncake", "Concurrency", o.Concurrency, 1, MaxConcurrency),
		remote.Between("mooncake", "SetupWithin", o.SetupWithin, time.Second, 5*time.Minute),
		remote.Between("mooncake", "Within", o.Within, 100*time.Millisecond, 10*time.Minute),
	)
}

// Reads reads memory of other nodes into the arena by Mooncake's transfer engine, and lets theirs
// read this one. The engine exists for Python alone, so it runs in a helper process that Reads
// starts, watches, and restarts. All methods may run concurrently.
//
// After a read that failed or took too long the engine may still write to the arena, and there is
// no way to ask it. So such a helper is killed, and the read returns after it was reaped: its end
// ends its connections, and with RDMA the kernel has taken the device from it by then.
type Reads struct {
	o      ReadsOptions
	places chan int // free places for reads
	cancel context.CancelFunc
	owned  sync.WaitGroup // supervise

	mu      sync.Mutex
	helper  *helper // nil: there is none
	exposed pool.Exposed
	why     error // why there is none
}

// OpenReads returns Reads that start a helper in the background. A library or device that
// the machine lacks is no error: Exposed and OnState report it. The error is about options.
func OpenReads(o ReadsOptions) (*Reads, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &Reads{o: o, places: numbers(o.Concurrency), cancel: cancel, why: errors.New("starting")}
	r.owned.Go(func() { r.supervise(ctx) })
	return r, nil
}

// Close ends the helper, and the reads in progress with it.
func (r *Reads) Close() error {
	r.cancel()
	r.owned.Wait()
	return nil
}

// Exposed returns how other nodes read the arena now, or the reason why they cannot.
func (r *Reads) Exposed() (pool.Exposed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.exposed, r.why
}

// Read reads memory of the node that a target names, at most maxPulls pieces. When it returns,
// nothing writes to these pieces of the arena for it any more. After an error any of them may have
// been written.
func (r *Reads) Read(target string, pulls []pool.Pull) error {
	if len(pulls) < 1 || len(pulls) > maxPulls {
		return fmt.Errorf("mooncake: %d pieces, allowed: 1 to %d", len(pulls), maxPulls)
	}
	place := <-r.places // each read ends within its time
	defer func() { r.places <- place }()
	r.mu.Lock()
	h, why := r.helper, r.why
	r.mu.Unlock()
	if h == nil {
		return fmt.Errorf("mooncake: %w: %w", ErrNotConnected, why)
	}
	q := &request{encode: func(id uint64) []byte { return encodePulls(id, target, pulls) }, free: func() {}}
	if !h.submit(q) {
		return fmt.Errorf("mooncake: %w", errDied)
	}
	codes := <-q.answer // nil after the helper was reaped
	switch {
	case len(codes) == 1 && codes[0] == 0:
		return nil
	case codes == nil:
		return fmt.Errorf("mooncake: %w: %w", errDied, h.why())
	}
	err := fmt.Errorf("mooncake: reading from %s failed, code %d", target, codes[0])
	h.killFor(err)
	<-h.reaped
	return err
}

// supervise keeps a helper running until ctx ends. The kernel kills a helper when the thread that
// started it ends, so this goroutine stays on its thread.
func (r *Reads) supervise(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	again := backoff.Backoff{First: firstRetry, Last: lastRetry}
	var told string
	for ctx.Err() == nil {
		ready, err := r.runHelper(ctx)
		if ready {
			again.Reset()
			told = ""
		}
		r.mu.Lock()
		r.helper, r.exposed, r.why = nil, pool.Exposed{}, err
		r.mu.Unlock()
		if ctx.Err() == nil && err.Error() != told {
			told = err.Error()
			r.o.OnState(err)
		}
		_ = again.Wait(ctx) // the loop asks ctx
	}
}

// runHelper runs one helper from its start until it is reaped. It returns whether it was ever
// ready, and why it ended.
func (r *Reads) runHelper(ctx context.Context) (ready bool, err error) {
	h, err := startHelper(r.o.Python, readsModule, r.o.environment(), r.o.Concurrency, readsMemory)
	if err != nil {
		return false, err
	}
	defer h.end()
	stop := context.AfterFunc(ctx, h.kill)
	b, err := h.greet(encodeReadsHello(&r.o), []int{r.o.Arena.FD}, r.o.SetupWithin)
	if !stop() || err != nil {
		h.kill()
		<-h.reaped // its output is complete then
		return false, errors.Join(err, errors.New(h.stderr.last()), ctx.Err())
	}
	w, err := decodeReadsWelcome(b)
	if err == nil && w.reason != "" {
		err = fmt.Errorf("helper: %s", w.reason)
	}
	if err != nil {
		return false, err
	}
	h.work(r.o.Within)
	r.mu.Lock()
	r.helper, r.why = h, nil
	r.exposed = pool.Exposed{Protocol: r.o.Protocol, Target: w.target, Address: uint64(w.base)}
	r.mu.Unlock()
	r.o.OnState(nil)
	select {
	case <-h.reaped:
		return true, h.why()
	case <-ctx.Done():
		h.kill()
		<-h.reaped
		return true, ctx.Err()
	}
}

// environment returns the helper's environment.
func (o *ReadsOptions) environment() []string {
	return append(append(os.Environ(), "PYTHONUNBUFFERED=1"), o.Env...)
}

// The frames between Reads and its helper are described in python/kvagent/mooncake_reads.py.

// maxPulls bounds the pieces of one read.
const maxPulls = 128

func encodeReadsHello(o *ReadsOptions) []byte {
	a := newArray(6)
	a.ints(wireVersion)
	a.text(o.Host)
	a.text(o.Protocol)
	a.text(o.Devices)
	a.ints(int64(o.Concurrency), int64(len(o.Arena.Base)))
	return a.frame()
}

// readsWelcome is the helper's first frame: how others reach its memory, or why they cannot.
type readsWelcome struct {
	reason, target string
	base           int64
}

func (w *readsWelcome) encode() []byte {
	a := newArray(4)
	a.ints(wireVersion)
	a.text(w.reason)
	a.text(w.target)
	a.ints(w.base)
	return a.frame()[4:]
}

func decodeReadsWelcome(b []byte) (w readsWelcome, err error) {
	d := msgpack.NewDecoder(bytes.NewReader(b))
	n, err := d.DecodeArrayLen()
	if err != nil || n != 4 {
		return w, errFrame
	}
	version, err := d.DecodeInt64()
	if err != nil || version != wireVersion {
		return w, fmt.Errorf("%w: version %d, must be %d (the Python package is of another release)",
			errFrame, version, wireVersion)
	}
	if w.reason, err = d.DecodeString(); err == nil {
		if w.target, err = d.DecodeString(); err == nil {
			w.base, err = d.DecodeInt64()
		}
	}
	if err != nil || len(w.reason) > maxReason || len(w.target) > pool.MaxTarget || w.base < 0 ||
		!bytes.Equal(w.encode(), b) {
		return readsWelcome{}, errFrame
	}
	return w, nil
}

func encodePulls(id uint64, target string, pulls []pool.Pull) []byte {
	a := newArray(3)
	a.ints(int64(id))
	a.text(target)
	a.list(len(pulls))
	for _, p := range pulls {
		a.list(3)
		a.ints(p.Offset, int64(p.Address), p.Length)
	}
	return a.frame()
}
