// Package mooncake keeps blocks in Mooncake Store, a shared store made of the memory of many nodes. Its client exists for Python alone, so it lives in
// a helper process (python/kvagent/mooncake.py) that the store starts, watches, and starts again.
//
//	Store ── frames, a Unix socket ──▶ helper ── RPC ──▶ mooncake_master
//	  │                                  │
//	  └── arena and bounce memory ───────┴── TCP or RDMA ──▶ segments of other nodes
//
// A value is pool.ValueHeader and the bytes under {prefix}{key}, where {key} is pool.Key.Text. Data inside of Options.Arena is read and written there
// by the helper; other data is copied through the bounce memory. A helper that still works on a request when its context ends goes on with it, and the request keeps its
// place and its share of the bounce memory until the helper answers, or is killed and reaped after Options.Silence. A caller whose data lies in the arena is told so by
// pool.InUse.
package mooncake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Times of the store's own.
const (
	firstRetry  = 100 * time.Millisecond // after which a helper is started again, twice as long each time
	lastRetry   = 10 * time.Second
	checkWithin = time.Minute          // for Python to say what is not installed
	leaveWithin = 6 * time.Second      // for a client with a segment to take leave of the master, which takes it 2 to 4 s
	grace       = 2 * time.Millisecond // for a process to be reaped whose socket has ended
)

// ErrNotConnected is wrapped by the error of a call while there is no helper.
var ErrNotConnected = errors.New("not connected")

// Store implements pool.Store. All methods may run at once; after Close they fail.
type Store struct {
	o         Options
	bounce    Memory
	values    chan int // shares of the bounce memory that are free, by number
	questions chan int // places for questions and deletes
	count     counts
	condition *remote.Condition
	stock     remote.Stock
	transfers *transfers

	cancel context.CancelFunc
	owned  sync.WaitGroup // supervise

	mu     sync.Mutex
	helper *helper // nil: not connected
	why    error   // why not
}

var _ pool.Store = (*Store)(nil)

// Open checks that Python has what is needed, makes a store, and starts and connects its helper in the background, also later and again: a master
// that is not there yet is a store that is lost for the time being. The error says which option is not allowed, or what is to be installed.
func Open(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if err := checkPython(&o); err != nil {
		return nil, err
	}
	bounce, err := newMemory(o.Bounce)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{
		o: o, bounce: bounce, values: numbers(o.Concurrency), questions: numbers(o.Concurrency), cancel: cancel,
		why: errors.New("connecting"), transfers: newTransfers(o.FailingFor), condition: remote.NewCondition(remote.Lost, o.OnState),
	}
	s.owned.Go(func() { s.supervise(ctx) })
	return s, nil
}

func numbers(n int) chan int {
	c := make(chan int, n)
	for i := range n {
		c <- i
	}
	return c
}

// Close ends the helper. Calls under way fail; none may use the store's memory any more when it returns.
func (s *Store) Close() error {
	s.cancel()
	s.owned.Wait()
	s.takeBack()
	return s.bounce.close()
}

// takeBack waits until nobody uses the bounce memory: callers may be copying from it.
func (s *Store) takeBack() {
	for range s.o.Concurrency {
		<-s.values
	}
	for i := range s.o.Concurrency {
		s.values <- i // for those who wait for one, and will see that there is no helper
	}
}

// supervise keeps a helper. The kernel kills a helper when the thread that started it ends, so this goroutine keeps its thread.
func (s *Store) supervise(ctx context.Context) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pause := firstRetry
	for ctx.Err() == nil {
		began := time.Now()
		s.lose(s.live(ctx))
		if time.Since(began) > lastRetry+s.o.SetupWithin {
			pause = firstRetry
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		pause = min(2*pause, lastRetry)
	}
}

// lose has no helper until the next one is connected.
func (s *Store) lose(why error) {
	s.mu.Lock()
	s.helper, s.why = nil, why
	s.mu.Unlock()
	s.condition.Turn(remote.Lost, why)
}

// live is the life of a helper, from its start until it is reaped. The error is why it ended.
func (s *Store) live(ctx context.Context) error {
	host, err := s.reach(ctx)
	if err != nil {
		return err
	}
	s.count.starts.Add(1)
	h, err := startHelper(&s.o)
	if err != nil {
		return err
	}
	defer h.end()
	stop := context.AfterFunc(ctx, h.kill)
	err = h.greet(&s.o, host, &s.bounce)
	if !stop() || err != nil {
		return errors.Join(err, ctx.Err())
	}
	s.transfers.begin()
	h.work(s.o.Silence)
	s.mu.Lock()
	s.helper, s.why = h, nil
	s.mu.Unlock()
	s.condition.Turn(remote.OK, nil)
	select {
	case <-h.reaped:
	case <-h.useless:
		s.count.replaced.Add(1)
		s.lose(errNoTransfers) // nobody asks it any more
		h.leave(s.o.leave)
		return fmt.Errorf("helper: replaced: %w", errNoTransfers)
	case <-ctx.Done():
		h.leave(s.o.leave)
		return ctx.Err()
	}
	s.count.deaths.Add(1)
	if h.wasKilled() {
		s.count.kills.Add(1)
	}
	return h.why()
}

// reach asks whether anybody listens where the master should be, because the client would wait a minute and a half, and gives the name that
// others reach this node by.
func (s *Store) reach(ctx context.Context) (host string, err error) {
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
