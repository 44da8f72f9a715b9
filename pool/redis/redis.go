// Package redis keeps blocks in Redis or Valkey: one server, a cluster, or what sentinels name. Many agents may share one.
//
//	{prefix}{key}              header, nonce, bytes of a chunk, data   up to ChunkBytes of it
//	{prefix}{key}#{nonce}#{n}  data                                    the n-th chunk of the rest, n from 1 on
//
// {key} is pool.Key.Text, the header pool.ValueHeader. The chunks of the rest are written first, under a number that their writer drew, and the value
// that names them last and only if there is none (SET NX): a block is visible when it is whole, and of two writers the first one wins. Until then
// the chunks have a time to live, so that those of a writer that died go by themselves.
package redis

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Times of the store's own.
const (
	orphanTTL  = time.Hour // of chunks that no value names yet
	firstRetry = 100 * time.Millisecond
	lastRetry  = 10 * time.Second
	usageEvery = 10 * time.Second // how old what Usage says may be
)

// ErrNotConnected is wrapped by the error of a call while there is no server.
var ErrNotConnected = errors.New("not connected")

// Store implements pool.Store. All methods may run at once; after Close they fail.
type Store struct {
	o         Options
	places    chan struct{} // one for each pipeline under way
	count     counts
	condition *remote.Condition

	cancel context.CancelFunc
	owned  sync.WaitGroup // connect and watch

	mu     sync.Mutex
	client rueidis.Client // nil: not connected
	why    error          // why not
	usage  pool.Usage
}

var _ pool.Store = (*Store)(nil)

// Open makes a store and connects in the background, also later and again: a server that is not there yet is a store that is lost for the
// time being. The error says which option is not allowed.
func Open(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{o: o, places: make(chan struct{}, o.Concurrency), cancel: cancel, why: errors.New("connecting"), condition: remote.NewCondition(remote.Lost, o.OnState)}
	s.owned.Go(func() { s.run(ctx) })
	return s, nil
}

// Close ends the connections. Calls under way fail.
func (s *Store) Close() error {
	s.cancel()
	s.owned.Wait()
	return nil
}

// run connects, and then keeps Usage and the state up to date.
func (s *Store) run(ctx context.Context) {
	client := s.connect(ctx)
	if client == nil {
		return
	}
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	for {
		s.refresh(ctx, client)
		select {
		case <-tick.C:
		case <-ctx.Done():
			s.mu.Lock()
			s.client, s.why = nil, errors.New("closed")
			s.mu.Unlock()
			client.Close()
			return
		}
	}
}

// connect tries until there is a server, with growing pauses. Afterwards the client connects again by itself. Nil: ctx ended.
func (s *Store) connect(ctx context.Context) rueidis.Client {
	for pause := firstRetry; ; pause = min(2*pause, lastRetry) {
		client, err := rueidis.NewClient(s.o.client())
		s.mu.Lock()
		if err == nil {
			s.client, s.why = client, nil
			s.mu.Unlock()
			s.condition.Turn(remote.OK, nil)
			return client
		}
		s.why = err
		s.mu.Unlock()
		if isDenied(err) {
			s.condition.Turn(remote.Denied, err)
		}
		s.count.dials.Add(1)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
	}
}

// enter gives the client and a place for a pipeline, which leave gives back.
func (s *Store) enter(ctx context.Context) (rueidis.Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	client, why := s.client, s.why
	s.mu.Unlock()
	if client == nil {
		return nil, fmt.Errorf("redis: %w: %w", ErrNotConnected, why)
	}
	select {
	case s.places <- struct{}{}:
		return client, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *Store) leave() { <-s.places }

// do runs a pipeline of commands: each its name, its key and the rest. It returns with ctx, whatever the server does; its commands may take effect afterwards nevertheless.
func (s *Store) do(ctx context.Context, commands [][]string) ([]rueidis.RedisResult, error) {
	if len(commands) == 0 {
		return nil, nil
	}
	client, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer s.leave()
	pipeline := make(rueidis.Commands, len(commands))
	for i, c := range commands {
		pipeline[i] = client.B().Arbitrary(c[0]).Keys(c[1]).Args(c[2:]...).Build()
	}
	results := client.DoMulti(ctx, pipeline...)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for i := range results {
		err = results[i].Error()
		if err == nil || answered(err) {
			s.condition.Turn(s.stateAfter(err), err)
			return results, nil
		}
	}
	s.count.errors.Add(1)
	s.condition.Turn(remote.Lost, err)
	if errors.Is(err, context.DeadlineExceeded) {
		return nil, fmt.Errorf("redis: %w: %v", errSilent, s.o.Silence) // the client's own limit, which it takes for the caller's
	}
	return nil, fmt.Errorf("redis: %w", err)
}

// errSilent is that of a call whose servers said nothing for Silence.
var errSilent = errors.New("no answer within")

// answered says whether an error is what a server said of one command, and not that nobody said anything.
func answered(err error) bool {
	_, ok := rueidis.IsRedisErr(err)
	return ok || rueidis.IsRedisNil(err)
}
