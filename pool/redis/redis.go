// Package redis keeps blocks in Redis or Valkey: one server, a cluster, or servers named by
// sentinels. Many agents may share them.
//
// A value is under {prefix}{key}, where {key} is pool.Key.Text. It is stored if there is none (SET
// NX), so the first of two writers wins.
package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Fixed times.
const (
	firstRetry  = 100 * time.Millisecond
	lastRetry   = 10 * time.Second
	masterEvery = time.Second // between two questions to the sentinels
)

// ErrNotConnected is wrapped by errors of calls while there is no connection.
var ErrNotConnected = errors.New("not connected")

// Store implements pool.Store. All methods may run concurrently; after Close they fail.
type Store struct {
	o         Options
	places    chan struct{} // one for each pipeline in progress
	count     [counts]atomic.Uint64
	condition *remote.Condition

	cancel context.CancelFunc
	owned  sync.WaitGroup // run

	mu     sync.Mutex
	client rueidis.Client // nil while not connected
	why    error          // why it is not connected
}

var _ pool.Store = (*Store)(nil)

// Open returns a store that connects in the background and reconnects later. A server that is not
// there yet makes the store Lost, not an error; the error is about options.
func Open(o Options) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Store{
		o: o, places: make(chan struct{}, o.Concurrency), cancel: cancel, why: errors.New("connecting"),
		condition: remote.NewCondition(remote.Lost, o.OnState),
	}
	s.owned.Go(func() { s.run(ctx) })
	return s, nil
}

// Close closes the connections. Calls in progress fail.
func (s *Store) Close() error {
	s.cancel()
	s.owned.Wait()
	return nil
}

// run connects, and connects again when the sentinels name another master, until ctx ends.
func (s *Store) run(ctx context.Context) {
	for ctx.Err() == nil {
		client, all, master := s.connect(ctx)
		if client == nil {
			return
		}
		why := s.serve(ctx, master)
		s.mu.Lock()
		s.client, s.why = nil, why
		s.mu.Unlock()
		if ctx.Err() == nil {
			s.condition.Set(remote.Lost, why)
		}
		all.close()
		client.Close()
	}
}

// serve returns why the client is not used any more.
func (s *Store) serve(ctx context.Context, master string) error {
	sentinels := time.NewTicker(masterEvery)
	defer sentinels.Stop()
	for {
		select {
		case <-sentinels.C:
			if now, err := s.master(ctx); err == nil && now != master {
				return fmt.Errorf("the master is now %s", now)
			}
		case <-ctx.Done():
			return errors.New("closed")
		}
	}
}

// connect tries to connect, with growing pauses, to the servers and with Sentinel to the master.
// The client reconnects by itself afterwards. It returns nil if ctx ended.
func (s *Store) connect(ctx context.Context) (client rueidis.Client, all *connections, master string) {
	for again := (backoff.Backoff{First: firstRetry, Last: lastRetry}); ; {
		master, err := s.master(ctx)
		if err == nil {
			var o rueidis.ClientOption
			if o, all = s.o.client(); master != "" {
				o.InitAddress = []string{master}
			}
			if client, err = rueidis.NewClient(o); err != nil {
				all.close()
			}
		}
		s.mu.Lock()
		if err == nil {
			s.client, s.why = client, nil
			s.mu.Unlock()
			s.condition.Set(remote.OK, nil)
			return client, all, master
		}
		s.why = err
		s.mu.Unlock()
		if isDenied(err) {
			s.condition.Set(remote.Denied, err)
		}
		s.count[countDials].Add(1)
		if again.Wait(ctx) != nil {
			return nil, nil, ""
		}
	}
}

// master asks the sentinels, one after the other, for the address of the master. Without Sentinel
// it returns none. The library's own client of sentinels panics at some of their answers.
func (s *Store) master(ctx context.Context) (addr string, err error) {
	if s.o.Mode != Sentinel {
		return "", nil
	}
	for _, sentinel := range s.o.Addresses {
		if addr, err = s.ask(ctx, sentinel); err == nil || ctx.Err() != nil {
			break
		}
	}
	return addr, err
}

func (s *Store) ask(ctx context.Context, sentinel string) (addr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.o.Silence)
	defer cancel()
	o, all := s.o.client()
	o.InitAddress, o.SelectDB = []string{sentinel}, 0
	client, err := rueidis.NewClient(o)
	if err != nil {
		all.close()
		return "", fmt.Errorf("redis: sentinel %s: %w", sentinel, err)
	}
	defer func() {
		all.close()
		client.Close()
	}()
	question := client.B().SentinelGetMasterAddrByName().Master(s.o.MasterName).Build()
	named, err := client.Do(ctx, question).AsStrSlice()
	if err == nil && len(named) != 2 {
		err = fmt.Errorf("%d words for the address of master %s", len(named), s.o.MasterName)
	}
	if err != nil {
		return "", fmt.Errorf("redis: sentinel %s: %w", sentinel, err)
	}
	return net.JoinHostPort(named[0], named[1]), nil
}

// enter returns the client and takes a place for a pipeline, which leave frees.
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

// do runs a pipeline of commands, each with its name, its key and its arguments. It returns when
// ctx ends; the commands may still take effect after that.
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
			s.condition.Set(s.stateAfter(err), err)
			return results, nil
		}
	}
	s.count[countErrors].Add(1)
	s.condition.Set(remote.Lost, err)
	if errors.Is(err, context.DeadlineExceeded) {
		// It is the client's own limit, which it reports as the caller's.
		return nil, fmt.Errorf("redis: %w: %v", errSilent, s.o.Silence)
	}
	return nil, fmt.Errorf("redis: %w", err)
}

// errSilent is wrapped by the error of a call that no server answered within Silence.
var errSilent = errors.New("no answer within")

// answered reports whether an error is a server's answer to a command.
func answered(err error) bool {
	_, ok := rueidis.IsRedisErr(err)
	return ok || rueidis.IsRedisNil(err)
}

// Mode is the kind of deployment.
type Mode uint8

// The modes.
const (
	Single   Mode = iota // one server, with or without replicas
	Cluster              // Redis Cluster or Valkey Cluster: any of its nodes
	Sentinel             // sentinels that know where the master is
)

// Options of a store. Fields left zero take their default, if one is named.
type Options struct {
	Mode       Mode
	Addresses  []string // host:port of the servers, the cluster's nodes, or the sentinels
	MasterName string   // Sentinel: the sentinels' name for the master
	Database   int      // Single and Sentinel: 0 to 65535
	Username   string   // of the ACL; empty: the default user
	Password   string
	TLS        *tls.Config // nil: none
	Prefix     string      // of every key, at most MaxPrefix bytes; default "kvagent:"
	// TTL is how long after it was written a block expires, MinTTL to MaxTTL; default DefaultTTL. A
	// use does not prolong it. Markers of resets do not expire.
	TTL         time.Duration
	Concurrency int           // concurrent pipelines; default 8
	BatchBytes  int64         // data of one pipeline; default 16 MiB
	DialTimeout time.Duration // default 1 s
	// Silence is how long a server may leave a command unanswered before its connection is
	// replaced; default 5 s. A call ends with its context in any case.
	Silence time.Duration
	// OnState is called with changes of the store's state; it must not call the store. May be nil.
	OnState remote.OnState
}

// Limits of options.
const (
	MaxPrefix    = 128
	MinTTL       = time.Second
	DefaultTTL   = 7 * 24 * time.Hour
	MaxTTL       = 10 * 365 * 24 * time.Hour
	maxAddresses = 64
)

func (o *Options) complete() error {
	o.Prefix = cmp.Or(o.Prefix, "kvagent:")
	o.TTL = cmp.Or(o.TTL, DefaultTTL)
	o.Concurrency = cmp.Or(o.Concurrency, 8)
	o.BatchBytes = cmp.Or(o.BatchBytes, 16<<20)
	o.DialTimeout = cmp.Or(o.DialTimeout, time.Second)
	o.Silence = cmp.Or(o.Silence, 5*time.Second)
	return errors.Join(
		o.checkAddresses(),
		remote.Between("redis", "Database", o.Database, 0, 65535),
		remote.Between("redis", "Prefix", len(o.Prefix), 1, MaxPrefix),
	)
}

func (o *Options) checkAddresses() error {
	if len(o.Addresses) == 0 || len(o.Addresses) > maxAddresses {
		return fmt.Errorf("redis: %d Addresses, allowed: 1 to %d", len(o.Addresses), maxAddresses)
	}
	for _, a := range o.Addresses {
		if host, port, err := net.SplitHostPort(a); err != nil || host == "" || port == "" {
			return fmt.Errorf("redis: Addresses: %q, allowed: host:port", a)
		}
	}
	switch {
	case o.Mode > Sentinel:
		return fmt.Errorf("redis: Mode is %d, allowed: 0 to %d", o.Mode, Sentinel)
	case (o.Mode == Sentinel) != (o.MasterName != ""):
		return fmt.Errorf("redis: MasterName is %q, allowed: a name with Sentinel, else none", o.MasterName)
	case o.Mode == Cluster && o.Database != 0:
		return fmt.Errorf("redis: Database is %d, allowed: 0 in a cluster", o.Database)
	case strings.ContainsAny(o.Prefix, "{}"):
		return fmt.Errorf("redis: Prefix is %q, allowed: one without braces, "+
			"which would put all keys in one slot of a cluster", o.Prefix)
	}
	return nil
}

// client returns the client library's options, and the connections that a client of them opens: no
// cache, and no retries, since they would not be counted.
func (o *Options) client() (rueidis.ClientOption, *connections) {
	all := &connections{
		max: maxConnections + o.Concurrency, redirects: o.Mode == Cluster, open: map[*bounded]bool{},
	}
	c := rueidis.ClientOption{
		InitAddress: o.Addresses, SelectDB: o.Database, ForceSingleClient: o.Mode != Cluster,
		Username: o.Username, Password: o.Password, TLSConfig: o.TLS, ClientName: "kvagent",
		DialCtxFn:          all.dial,
		ReadBufferEachConn: 4 << 10, // besides the one of each connection
		Dialer:             net.Dialer{Timeout: o.DialTimeout, KeepAlive: o.Silence},
		ConnWriteTimeout:   o.Silence,
		DisableCache:       true,
		DisableRetry:       true,
		AlwaysPipelining:   true,
	}
	if o.Mode == Cluster { // of each node
		c.WriteBufferEachConn, c.RingScaleEachConn = 32<<10, 8
	}
	return c, all
}
