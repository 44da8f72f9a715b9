package mooncake

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
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

	Concurrency int           // reads that the helper works on at once; default 8
	Python      string        // interpreter of the helper; default "python3"
	Env         []string      // of the helper, in addition to this process's: NAME=VALUE
	SetupWithin time.Duration // bounds the start of a helper; default 60 s: with RDMA all of the arena is pinned
	Within      time.Duration // bounds one read, after which the helper is killed; default 4 s

	// OnState is called when a helper is ready (reason is nil), and when there is none any more, or
	// another reason why there is none. It must not call the Reads. May be nil.
	OnState func(reason error)
}

func (o *ReadsOptions) complete() error {
	o.Protocol = cmp.Or(o.Protocol, "tcp")
	o.Concurrency = cmp.Or(o.Concurrency, 8)
	o.Python = cmp.Or(o.Python, "python3")
	o.SetupWithin = cmp.Or(o.SetupWithin, time.Minute)
	o.Within = cmp.Or(o.Within, 4*time.Second)
	if o.OnState == nil {
		o.OnState = func(error) {}
	}
	switch {
	case o.Host == "" || len(o.Host) > pool.MaxTarget-len(":65535") || !textual.MatchString(o.Host):
		return fmt.Errorf("mooncake: Host has %d bytes, allowed: 1 to %d, printable, no blanks", len(o.Host),
			pool.MaxTarget-len(":65535"))
	case len(o.Arena.Base) == 0:
		return errors.New("mooncake: Arena must be given")
	}
	return checkDevices(o.Protocol, o.Devices)
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

	told string // to OnState last, why there is no helper; of supervise alone

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
	r.owned.Go(func() { supervise(ctx, o.SetupWithin, r.runHelper, r.ended) })
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
	q := &request{frame: func(id uint64) any { return pullsFrame(id, target, pulls) }, free: func() {}}
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

// ended notes that there is no helper, and tells why if that is another reason than before.
func (r *Reads) ended(ctx context.Context, why error) {
	r.mu.Lock()
	r.helper, r.exposed, r.why = nil, pool.Exposed{}, why
	r.mu.Unlock()
	if ctx.Err() == nil && why.Error() != r.told {
		r.told = why.Error()
		r.o.OnState(why)
	}
}

// runHelper runs one helper from its start until it is reaped, and returns why it ended.
func (r *Reads) runHelper(ctx context.Context) error {
	h, err := startHelper(r.o.Python, readsModule, r.o.environment(), r.o.Concurrency, readsMemory)
	if err != nil {
		return err
	}
	defer h.end()
	stop := context.AfterFunc(ctx, h.kill)
	b, err := h.greet(r.o.hello(), []int{r.o.Arena.FD}, r.o.SetupWithin)
	if !stop() || err != nil {
		h.kill()
		<-h.reaped // its output is complete then
		return errors.Join(err, errors.New(h.stderr.last()), ctx.Err())
	}
	w, err := decodeReadsWelcome(b)
	if err != nil {
		return err
	}
	h.work(r.o.Within)
	r.mu.Lock()
	r.helper, r.why = h, nil
	r.exposed = pool.Exposed{Protocol: r.o.Protocol, Target: w.Target, Address: uint64(w.Base)}
	r.mu.Unlock()
	r.told = ""
	r.o.OnState(nil)
	select {
	case <-h.reaped:
		return h.why()
	case <-ctx.Done():
		h.kill()
		<-h.reaped
		return ctx.Err()
	}
}

// environment returns the helper's environment.
func (o *ReadsOptions) environment() []string {
	return append(append(os.Environ(), "PYTHONUNBUFFERED=1"), o.Env...)
}

// The frames between Reads and its helper are described in python/kvagent/mooncake_reads.py.

// maxPulls bounds the pieces of one read.
const maxPulls = 128

type (
	readsHello struct {
		Version                 int
		Host, Protocol, Devices string
		Concurrency             int
		Arena                   int64 // bytes
	}

	// readsWelcome is the helper's first frame: how others reach its memory, or why they cannot.
	readsWelcome struct {
		Version        int
		Reason, Target string
		Base           int64
	}

	pullsRequest struct {
		ID     uint64
		Target string
		Pulls  []pull
	}
	pull struct {
		Offset  int64
		Address uint64
		Length  int64
	}
)

func (o *ReadsOptions) hello() *readsHello {
	return &readsHello{wireVersion, o.Host, o.Protocol, o.Devices, o.Concurrency, int64(len(o.Arena.Base))}
}

func decodeReadsWelcome(b []byte) (readsWelcome, error) {
	w, err := decode[readsWelcome](b)
	if err == nil {
		err = checkWelcome(w.Version, w.Reason)
	}
	if err == nil && (len(w.Target) > pool.MaxTarget || w.Base < 0) {
		err = errFrame
	}
	return w, err
}

func pullsFrame(id uint64, target string, pulls []pool.Pull) *pullsRequest {
	q := &pullsRequest{id, target, make([]pull, len(pulls))}
	for i, p := range pulls {
		q.Pulls[i] = pull{p.Offset, p.Address, p.Length}
	}
	return q
}
