package tier

import (
	"context"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/s3"
)

// frozen is a store that hangs in every method as long as it may: Usage, which has no deadline,
// until thaw.
type frozen struct {
	local bool // Exists of a local store answers from memory, whatever its device does
	thaw  chan struct{}
}

func (f *frozen) Put(ctx context.Context, _ []pool.Item) error { return f.wait(ctx) }
func (f *frozen) Get(ctx context.Context, _ []pool.Item) error { return f.wait(ctx) }
func (f *frozen) Delete(ctx context.Context, _ []pool.Key) error {
	return f.wait(ctx)
}

func (f *frozen) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	if !f.local {
		return f.wait(ctx)
	}
	for i := range keys {
		if keys[i].Hash.Bytes[0] < 240 {
			status[i] = pool.OK
		}
	}
	return nil
}

func (f *frozen) Usage() pool.Usage { <-f.thaw; return pool.Usage{} }

func (f *frozen) wait(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

// silentService is S3 by its real client, over connections that are accepted and never answered.
func silentService(t *testing.T) *s3.Store {
	t.Helper()
	transport := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		context.AfterFunc(t.Context(), func() { _ = theirs.Close() })
		return ours, nil
	}}
	s, err := s3.Open(s3.Options{
		Endpoint: "blocks.example:9000", Insecure: true, PathStyle: true, Region: "us-east-1", Bucket: "blocks",
		AccessKey: "a", SecretKey: "b", Transport: transport,
	})
	check(t, err)
	return s
}

// TestNothingWaitsForAHungStore checks that no look-up and no save waits for a store that hangs, or
// for a lock that a call to it holds. By a clock that advances only when all wait, a look-up ends
// at its deadline or before, to the nanosecond, and everything else at once. On a real clock the
// machine adds the rest.
func TestNothingWaitsForAHungStore(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) []Tier{
		"shared": func(*testing.T) []Tier {
			return []Tier{{Name: "shared", Store: &frozen{thaw: make(chan struct{})}, Write: OnSave, BreakAfter: 1000}}
		},
		"disk and shared": func(*testing.T) []Tier {
			thaw := make(chan struct{})
			return []Tier{
				{Name: "disk", Store: &frozen{local: true, thaw: thaw}, Local: true, Write: OnSecondUse,
					BreakAfter: 1000},
				{Name: "shared", Store: &frozen{thaw: thaw}, Write: OnSave},
			}
		},
		"s3": func(t *testing.T) []Tier { return []Tier{{Name: "s3", Store: silentService(t), Write: OnSave}} },
	} {
		t.Run(name, func(t *testing.T) {
			stuck := time.AfterFunc(patience,
				func() { panic("a look-up waits for a lock that a call to a hung store holds") })
			defer stuck.Stop()
			synctest.Test(t, func(t *testing.T) { lookUpWhileHung(t, open(t)) })
		})
	}
}

func lookUpWhileHung(t *testing.T, tiers []Tier) {
	n := newNode(t, 600, 2, Options{}, tiers...) // room for all: no entry is left without a shard
	var all sync.WaitGroup
	for k := range 8 {
		all.Go(func() {
			name := string(rune('a' + k))
			for round := range 40 { // over several openings of the breaker
				n.atOnce("save", func() { n.save(chain(name, 5+round%20)) })
				deadline := time.Duration(100+100*round) * time.Microsecond
				h := chain(name, 60)
				start := time.Now()
				n.ask(h, deadline)
				if took := time.Since(start); took > deadline {
					t.Errorf("a look-up with a deadline of %v ended after %v", deadline, took)
				}
				n.atOnce("prefix", func() { n.Prefix(n.space, 0, h) })
				n.atOnce("exists", func() { n.Exists(n.space, 0, h, make([]bool, h.N)) })
				n.atOnce("pin and unpin", func() {
					_, refs, _ := n.Pin(n.space, 0, h, 1<<20, nil)
					n.Settle(refs, func() {})
					if round%2 == 0 {
						n.Unpin(refs)
					} else {
						n.Hint(refs)
					}
				})
				time.Sleep(100 * time.Millisecond)
			}
		})
	}
	all.Wait()
	for i := range tiers {
		if f, ok := tiers[i].Store.(*frozen); ok {
			close(f.thaw)
			break // they have one in common
		}
	}
	for i, r := range n.Report().Tiers {
		if r.Timeouts == 0 {
			t.Errorf("tier %d never hung: %+v", i, r)
		}
	}
}

// atOnce checks that a call takes no time.
func (n *node) atOnce(what string, do func()) {
	n.t.Helper()
	start := time.Now()
	if do(); time.Since(start) != 0 {
		n.t.Errorf("%s took %v", what, time.Since(start))
	}
}
