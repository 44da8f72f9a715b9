package agent

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/guests"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/cudaipc/node"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// patience is how long a test waits for an event that must come; it is no part of any result.
const patience = 20 * time.Second

// arenaPool is a pool on an arena that a device can map.
type arenaPool interface {
	pool.Memory
	Close() error
}

// rig is an agent with a real device and real sockets in a directory of its own.
type rig struct {
	t      testing.TB
	dir    string
	pool   arenaPool
	agent  *Agent
	guests *guests.Guests
	device cudaipc.Device
	logs   *observer.ObservedLogs

	history     *history.History // nil: nothing is remembered
	mayMismatch bool             // its device goes wrong on purpose
}

type rigOption func(*rigConfig)

type rigConfig struct {
	Config
	joined    guests.Options
	poolBytes int64
	tiers     []tier.Tier    // empty: memory alone
	prefetch  int64          // bytes of the stack; 0: half the pool
	moved     *mover.Options // nil: the device is in this process, unless moverEnv says otherwise
	log       []zap.Option
	wrap      func(d cudaipc.Device, arena []byte) cudaipc.Device
	peers     func(p arenaPool) guests.Peers      // nil: an agent on its own
	device    func(cudaipc.Device) cudaipc.Device // replaces the device; nil: it stays

	epochEvery time.Duration // of the stack; 0: its default

	beforeStart func(*guests.Guests) // nil: nothing
}

// moverEnv makes every rig's device one in a mover.
const moverEnv = "KVAGENT_TEST_MOVER"

func withPool(bytes int64) rigOption { return func(c *rigConfig) { c.poolBytes = bytes } }
func withMover(o mover.Options) rigOption {
	return func(c *rigConfig) { c.moved = &o }
}
func withDevice(f func(cudaipc.Device) cudaipc.Device) rigOption {
	return func(c *rigConfig) { c.device = f }
}
func withConfig(f func(*Config)) rigOption         { return func(c *rigConfig) { f(&c.Config) } }
func withGuests(f func(*guests.Options)) rigOption { return func(c *rigConfig) { f(&c.joined) } }

// newRig starts an agent, and ends it with the test: nothing may be left then.
func newRig(t testing.TB, options ...rigOption) *rig {
	t.Helper()
	c := rigConfig{poolBytes: 4 << 20}
	c.VerifySample = 2 // every other block, in all tests
	if _, bench := t.(*testing.B); bench {
		c.VerifySample = 1000 // serve's default
	}
	c.Limits = DefaultLimits
	c.Limits.Predecessor = 500 * time.Millisecond
	c.joined.History = history.New()
	for _, o := range options {
		o(&c)
	}
	dir, err := os.MkdirTemp("", "kv")
	check(t, err)
	core, logs := observer.New(zap.DebugLevel)
	r := &rig{t: t, dir: dir, pool: openTestPool(t, &c), logs: logs, history: c.joined.History}
	if c.peers != nil {
		c.joined.Peers = c.peers(r.pool)
	}
	r.device = openTestDevice(t, r.pool, &c)
	if r.mayMismatch = c.wrap != nil; c.wrap != nil {
		arena, _ := r.pool.Arena()
		r.device = c.wrap(r.device, arena)
	}
	if c.device != nil {
		r.device = c.device(r.device)
	}
	c.Dir = filepath.Join(dir, "s")
	r.dir = c.Dir
	c.PeerAddress = c.joined.Peers.Address
	log := zap.New(core, c.log...)
	r.agent, err = New(c.Config, r.pool, r.device, log)
	check(t, err)
	r.guests = guests.Join(r.agent, r.pool, c.joined, log)
	r.agent.Plug(r.guests)
	t.Cleanup(func() {
		r.agent.Close()
		r.checkNothingLeft()
		check(t, r.device.Close())
		check(t, r.pool.Close())
		check(t, os.RemoveAll(dir))
	})
	if c.beforeStart != nil {
		c.beforeStart(r.guests)
	}
	check(t, r.agent.Start())
	return r
}

func openTestDevice(t testing.TB, p arenaPool, c *rigConfig) cudaipc.Device {
	t.Helper()
	arena, fd := p.Arena()
	if c.moved == nil && os.Getenv(moverEnv) == "" {
		return host.Open(arena)
	}
	o := mover.Options{}
	if c.moved != nil {
		o = *c.moved
	}
	o.Name, o.Device, o.ArenaFD, o.ArenaSize, o.Node = "host", cudaipc.HostDevice, fd, p.Stats().Capacity, -1
	o.Command, o.Env = devicetest.MoverCommand, devicetest.MoverEnv
	mover, err := mover.New(o)
	check(t, err)
	return node.Open(node.Options{Host: mover, NoGPU: "this is a test"})
}

func openTestPool(t testing.TB, c *rigConfig) arenaPool {
	t.Helper()
	if len(c.tiers) > 0 {
		return openStack(t, c)
	}
	return openMemory(t, c)
}

// slabBytes is small enough that a few blocks fill a pool.
const slabBytes = 16 << 10

func openMemory(t testing.TB, c *rigConfig) arenaPool {
	t.Helper()
	p, err := dram.Open(dram.Options{
		Bytes: c.poolBytes, SlabBytes: slabBytes, HugePages: dram.Off, Left: c.left(),
	})
	check(t, err)
	return p
}

// left returns who is told of what leaves memory, if anybody is.
func (c *rigConfig) left() func(*pool.Departure) {
	if c.joined.History == nil {
		return nil
	}
	return c.joined.History.Left
}

// checkNothingLeft holds what must be true after any run, however it ended.
func (r *rig) checkNothingLeft() {
	r.t.Helper()
	st := r.guests.Status()
	if st.Leases != 0 || st.LeaseBytes != 0 {
		r.t.Errorf("the ledger of leases is not empty: %d leases, %d bytes", st.Leases, st.LeaseBytes)
	}
	if st.Regions != 0 || st.Engines != 0 || st.Sessions != 0 || st.Jobs != 0 {
		r.t.Errorf("left: %d regions, %d engines, %d sessions, %d jobs", st.Regions, st.Engines, st.Sessions, st.Jobs)
	}
	if st.Pool.Pinned != 0 {
		r.t.Errorf("%d bytes are pinned in the pool", st.Pool.Pinned)
	}
	if n := r.agent.memory.pendingFDs.Load(); n != 0 {
		r.t.Errorf("%d descriptors of incomplete registrations are counted", n)
	}
	if x := &st.Transfers; x.Open != 0 || x.Fetching != 0 {
		r.t.Errorf("left: %+v", x)
	}
	if s := &st.Sample; !r.mayMismatch && s.Saves.Mismatched+s.Loads.Mismatched > 0 {
		r.t.Errorf("blocks that do not match: %+v", s)
	}
	if st.CleanupMaxMS >= 2000 {
		r.t.Errorf("a clean-up took %.1f ms", st.CleanupMaxMS)
	}
}

// waitFor waits until something holds.
func (r *rig) waitFor(what string, holds func(admin.Status) bool) {
	r.t.Helper()
	defer func() {
		if r.t.Failed() {
			r.t.Logf("the status is %+v", r.guests.Status())
		}
	}()
	pooltest.Until(r.t, what, func() bool { return holds(r.guests.Status()) })
}

func (r *rig) path(name string) string { return filepath.Join(r.dir, name) }

// asker returns a look-up client of a socket of the agent.
func (r *rig) asker(name string) *mockengine.LookupClient {
	c := mockengine.DialLookup(r.path(name))
	r.t.Cleanup(func() { check(r.t, c.Close()) })
	return c
}

// ask asks in the own form, with a deadline that a busy machine keeps.
func ask(t testing.TB, c *mockengine.LookupClient, q ipc.LookupRequest) ipc.LookupReply {
	t.Helper()
	q.Form = ipc.FormOwn
	if q.DeadlineUS == 0 {
		q.DeadlineUS = uint32(patience / time.Microsecond)
	}
	reply, err := c.Ask(&q, patience)
	check(t, err)
	return reply
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// chain returns n hashes of 32 bytes, each with its number and the chain's seed in it.
func chain(seed byte, n int) []byte {
	blob := make([]byte, 0, n*pool.MaxHashLen)
	for i := range n {
		h := make([]byte, pool.MaxHashLen)
		h[0], h[1], h[2], h[31] = seed, byte(i), byte(i>>8), 0xA5
		blob = append(blob, h...)
	}
	return blob
}

// wantAtStart checks that the metrics of an agent that has served nothing have these lines.
func wantAtStart(t *testing.T, want ...string) {
	t.Helper()
	r := newRig(t, withGuests(func(o *guests.Options) { o.HTTP.HTTP = "127.0.0.1:0" }))
	answer, err := http.Get("http://" + r.httpAddr() + "/metrics")
	check(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	check(t, err)
	lines := strings.Split(string(text), "\n")
	for _, one := range want {
		if !slices.Contains(lines, one) {
			t.Errorf("no line %s", one)
		}
	}
}

// httpAddr returns the address on which HTTP listens.
func (r *rig) httpAddr() string {
	return fmt.Sprint(r.logs.FilterMessage("HTTP").All()[0].ContextMap()["addr"])
}
