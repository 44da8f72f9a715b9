// Package mooncake keeps blocks in Mooncake Store, a shared store made of the memory of many nodes.
// Its client exists for Python alone, so it runs in a helper process (python/kvagent/mooncake.py)
// that the store starts, watches, and restarts.
//
//	Store ── frames, a Unix socket ──▶ helper ── RPC ──▶ mooncake_master
//	  │                                  │
//	  └── arena and bounce memory ───────┴── TCP or RDMA ──▶ segments of other nodes
//
// A value is under {prefix}{key}, where {key} is pool.Key.Text. The helper reads and writes data
// inside Options.Arena in place; other data is copied through the bounce memory. When a context
// ends, a helper that works on the request continues, and the request keeps its place and its share
// of the bounce memory until the helper answers, or is killed after Options.Silence and reaped. A
// caller whose data is in the arena learns that from pool.InUse.
package mooncake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// helperSlack is what a helper may use besides its segment, its local buffer and what Python takes
// with the client, bytes. A helper that uses more is killed.
const helperSlack = 64 << 20

// Fixed times.
const (
	firstRetry  = 100 * time.Millisecond // first pause before a helper is restarted; doubles each time
	lastRetry   = 10 * time.Second
	checkWithin = time.Minute          // for Python to report what is not installed
	leaveWithin = 6 * time.Second      // for a client to deregister its segment at the master, which takes 2 to 4 s
	grace       = 2 * time.Millisecond // for a process whose socket has ended to be reaped
)

// ErrNotConnected is wrapped by errors of calls while there is no helper.
var ErrNotConnected = errors.New("not connected")

// Store implements pool.Store. All methods may run concurrently; after Close they fail.
type Store struct {
	o         Options
	memory    int64 // bytes that a helper may use
	bounce    Memory
	values    chan int // numbers of the free shares of the bounce memory
	questions chan int // free places for questions and deletes
	count     [counts]atomic.Uint64
	condition *remote.Condition
	transfers *transfers

	cancel context.CancelFunc
	owned  sync.WaitGroup // supervise

	mu     sync.Mutex
	helper *helper // nil while not connected
	why    error   // why it is not connected
}

var _ pool.Store = (*Store)(nil)

// Open checks the Python installation and returns a store that starts and connects its helper in
// the background, and restarts it later. A master that is not there yet makes the store Lost, not
// an error. The error is about options, or names what is to be installed.
func Open(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	memory, err := checkPython(&o)
	if err != nil {
		return nil, err
	}
	bounce, err := newMemory(o.Bounce)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{
		o: o, bounce: bounce, cancel: cancel, why: errors.New("connecting"),
		memory: memory + o.Segment + o.LocalBuffer + helperSlack,
		values: numbers(o.Concurrency), questions: numbers(o.Concurrency),
		transfers: newTransfers(o.FailingFor),
		condition: remote.NewCondition(remote.Lost, o.OnState),
	}
	s.owned.Go(func() { supervise(ctx, o.SetupWithin, s.runHelper, s.disconnect) })
	return s, nil
}

func numbers(n int) chan int {
	c := make(chan int, n)
	for i := range n {
		c <- i
	}
	return c
}

// Close ends the helper. Calls in progress fail. After it returns, none uses the store's memory.
func (s *Store) Close() error {
	s.cancel()
	s.owned.Wait()
	s.drainShares()
	return s.bounce.close()
}

// drainShares waits until no caller copies to or from the bounce memory.
func (s *Store) drainShares() {
	for range s.o.Concurrency {
		<-s.values
	}
	for i := range s.o.Concurrency {
		s.values <- i // for callers that wait for one and will then find no helper
	}
}

// supervise runs one helper after the other until ctx ends, with pauses that grow while helpers do
// not live much longer than their setup may take. The kernel kills a helper when the thread that
// started it ends, so this goroutine stays on its thread.
func supervise(
	ctx context.Context, setup time.Duration, run func(context.Context) error, ended func(context.Context, error),
) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	again := backoff.Backoff{First: firstRetry, Last: lastRetry}
	for ctx.Err() == nil {
		began := time.Now()
		ended(ctx, run(ctx))
		if time.Since(began) > lastRetry+setup {
			again.Reset()
		}
		_ = again.Wait(ctx) // the loop asks ctx
	}
}

// disconnect removes the helper until the next one is connected.
func (s *Store) disconnect(_ context.Context, why error) {
	s.mu.Lock()
	s.helper, s.why = nil, why
	s.mu.Unlock()
	s.condition.Set(remote.Lost, why)
}

// runHelper runs one helper from its start until it is reaped, and returns why it ended.
func (s *Store) runHelper(ctx context.Context) error {
	host, err := s.checkMaster(ctx)
	if err != nil {
		return err
	}
	s.count[countStarts].Add(1)
	h, err := startHelper(s.o.Python, module, s.o.environment(), 2*s.o.Concurrency, s.memory)
	if err != nil {
		return err
	}
	defer h.end()
	stop := context.AfterFunc(ctx, h.kill)
	err = h.handshake(&s.o, host, &s.bounce)
	if !stop() || err != nil {
		return errors.Join(err, ctx.Err())
	}
	s.transfers.begin()
	h.work(s.o.Silence)
	s.mu.Lock()
	s.helper, s.why = h, nil
	s.mu.Unlock()
	s.condition.Set(remote.OK, nil)
	select {
	case <-h.reaped:
	case <-h.replace:
		s.count[countReplaced].Add(1)
		s.disconnect(ctx, errNoTransfers) // it gets no more requests
		h.leave(s.o.leave)
		return fmt.Errorf("helper: replaced: %w", errNoTransfers)
	case <-ctx.Done():
		h.leave(s.o.leave)
		return ctx.Err()
	}
	s.count[countDeaths].Add(1)
	if h.wasKilled() {
		s.count[countKills].Add(1)
	}
	return h.why()
}

// checkMaster checks that the master's address accepts connections, since the client would wait a
// minute and a half. It returns the name by which others reach this node.
func (s *Store) checkMaster(ctx context.Context) (host string, err error) {
	if strings.Contains(s.o.Master, "://") {
		return s.hostName()
	}
	dialer := net.Dialer{Timeout: s.o.SetupWithin}
	nc, err := dialer.DialContext(ctx, "tcp", s.o.Master)
	if err != nil {
		return "", fmt.Errorf("master: %w", err)
	}
	defer nc.Close()
	if s.o.Host != "" {
		return s.o.Host, nil
	}
	host, _, err = net.SplitHostPort(nc.LocalAddr().String())
	return host, err
}

// Counts of a store since it was opened.
const (
	countStarts   = iota // helpers started
	countDeaths          // connected helpers that ended, for any reason
	countKills           // helpers killed because they hung
	countReplaced        // helpers ended because all their transfers failed; not in countDeaths
	countLate            // requests whose caller left while the helper worked in the arena
	countErrors          // requests that Mooncake did not answer
	countFull            // blocks refused because there was no room
	countFailed          // blocks that Mooncake refused for another reason
	countLarge           // blocks outside the arena too large for the bounce memory
	countInPlace         // bytes put and got in the arena
	countCopied          // bytes put and got through the bounce memory
	counts
)

// countNames are their names in reports.
var countNames = [counts]string{
	countStarts: "helper_starts", countDeaths: "helper_deaths", countKills: "helper_kills",
	countReplaced: "helpers_replaced", countLate: "late", countErrors: "unanswered", countFull: "full",
	countFailed: "refused", countLarge: "too_large", countInPlace: "bytes_in_place",
	countCopied: "bytes_copied",
}

var _ pool.Reporter = (*Store)(nil)

// Report implements pool.Reporter.
func (s *Store) Report() pool.StoreReport { return s.condition.Report(countNames[:], s.count[:]) }

// State returns the current state.
func (s *Store) State() remote.State { return s.condition.State() }

// setStateFrom sets the state because of a helper's answer, unless the helper was replaced.
func (s *Store) setStateFrom(h *helper, to remote.State, reason error) {
	s.mu.Lock()
	current := s.helper == h
	s.mu.Unlock()
	if current {
		s.condition.Set(to, reason)
	}
}

// answered notes that the master answered. Only a put shows that there is room again.
func (s *Store) answered(h *helper) {
	if s.State() == remote.Lost {
		s.setStateFrom(h, remote.OK, nil)
	}
}

// Usage returns nothing: Mooncake does not report its contents.
func (s *Store) Usage() pool.Usage { return pool.Usage{} }

// Error codes of Mooncake with a specific meaning.
const (
	codeNoRoom      = -200
	codeWrongLength = -600
	codeNotReady    = -703
	codeNotFound    = -704
	codeExists      = -705
	codeGone        = -712
	codeQuota       = -1700
)

// silent reports whether a code means that a master or a node did not answer.
func silent(code int64) bool { return code == codeTransfer || code <= -900 && code > -1000 }
