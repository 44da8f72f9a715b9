package agent

import (
	"context"
	"encoding/binary"
	"strings"
	"sync"
	"testing"
	"time"

	engines "github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
)

// Shape of the test engines: one group, one segment, blocks of 16 tokens.
const (
	testBlockTokens = 16
	testBlockBytes  = 4096
	testBlocks      = 64
)

// client is one session of a test engine, as an engine's process would have it.
type client struct {
	t        testing.TB
	conn     *ipc.Conn
	welcome  *ipc.Welcome
	engine   *engines.Host
	kv       *engines.HostMemory
	stream   *engines.HostStream
	messages chan any // closed at the end of the socket
	last     error    // why; readable once messages is closed
	job      uint64
	ending   sync.Once
}

// dial opens a session in the newest version.
func (r *rig) dial() *client {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, welcome, err := mockengine.DialSession(ctx, r.path(socketdir.Session), "test engine")
	check(r.t, err)
	c := &client{t: r.t, conn: conn, welcome: welcome, messages: make(chan any, 4096)}
	go c.pump()
	r.t.Cleanup(c.close)
	return c
}

func (c *client) pump() {
	defer close(c.messages)
	for {
		m, _, err := c.conn.Recv()
		if err != nil {
			c.last = err
			return
		}
		c.messages <- m
	}
}

// close ends the session, as the end of its process would.
func (c *client) close() {
	c.ending.Do(func() {
		_ = c.conn.Close() // the agent may have been quicker
		for range c.messages {
		}
		if c.engine != nil {
			check(c.t, c.engine.Close())
		}
	})
}

// next returns the next message of type T; notices that were not asked for are passed over.
func next[T any](c *client) T {
	c.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case m, more := <-c.messages:
			if !more {
				c.t.Fatalf("the session ended (%v) instead of a %T", c.last, *new(T))
			}
			if want, ok := m.(T); ok {
				return want
			}
			switch m.(type) {
			case *ipc.Switches, *ipc.Epoch:
			default:
				c.t.Fatalf("%T %+v instead of a %T", m, m, *new(T))
			}
		case <-limit:
			c.t.Fatalf("no %T came", *new(T))
		}
	}
}

func (c *client) send(m any, fds ...int) {
	c.t.Helper()
	check(c.t, c.conn.Send(m, fds...))
}

// register makes a REGISTER of the test shape.
func register(instance string) *ipc.Register {
	return &ipc.Register{
		Req: 1, Instance: instance, Role: ipc.RoleWorker, World: 1, Held: []uint32{0}, Shards: 1,
		Identity: []ipc.Pair{{Key: "dtype", Value: "bf16"}, {Key: "model", Value: "test"}, {Key: "tenant", Value: ""}},
		Groups:   []ipc.GroupDesc{{BlockTokens: testBlockTokens, NumBlocks: testBlocks}}, HashTokens: testBlockTokens,
	}
}

// scheduler makes a scheduler's REGISTER of the same engine.
func schedulerOf(m *ipc.Register) *ipc.Register {
	s := *m
	s.Role, s.Rank, s.Held, s.Sync, s.Regions, s.Segments = ipc.RoleScheduler, 0, nil, nil, 0, 0
	return &s
}

// prepare makes the memory of a worker, and the parts that follow its REGISTER.
func (c *client) prepare(m *ipc.Register) (regions *ipc.Regions, fds []int, segments *ipc.Segments) {
	c.t.Helper()
	var err error
	c.engine, err = engines.NewHost(8, 8)
	check(c.t, err)
	c.kv, err = c.engine.Alloc(0, testBlocks*testBlockBytes)
	check(c.t, err)
	c.stream = c.engine.NewStream()
	words, sync := c.engine.SyncDesc()
	m.Sync = &ipc.SyncDesc{
		Region: uint32(sync.Region), StepOff: sync.StepOff, EventsOff: sync.EventsOff, Events: sync.Events,
		RevokeOff: sync.RevokeOff, Revokes: sync.Revokes,
	}
	m.Regions, m.Segments = 2, 1
	kv := c.kv.Region()
	regions = &ipc.Regions{Req: m.Req, List: []ipc.RegionDesc{
		{ID: uint32(kv.ID), Kind: ipc.RegionFD, Size: kv.Size},
		{ID: uint32(words.ID), Kind: ipc.RegionFD, Size: words.Size},
	}}
	segments = &ipc.Segments{Req: m.Req, Shard: m.Held[0], List: []ipc.SegmentDesc{
		{Region: uint32(kv.ID), Stride: testBlockBytes, Bytes: testBlockBytes},
	}}
	return regions, []int{kv.FD, words.FD}, segments
}

// registerWorker sends all parts and waits for the answer.
func (c *client) registerWorker(m *ipc.Register) *ipc.Registered {
	c.t.Helper()
	regions, fds, segments := c.prepare(m)
	c.send(m)
	c.send(regions, fds...)
	c.send(segments)
	return next[*ipc.Registered](c)
}

// registered checks that a registration was done.
func (c *client) registered(answer *ipc.Registered) *ipc.Registered {
	c.t.Helper()
	if answer.Status != ipc.RegDone {
		c.t.Fatalf("registration refused: %s", answer.Text)
	}
	return answer
}

// joinEngine registers an engine's scheduler and all ranks, each its own shard.
func (r *rig) joinEngine(m *ipc.Register) (scheduler *client, workers []*client, answer *ipc.Registered) {
	r.t.Helper()
	scheduler = r.dial()
	scheduler.send(schedulerOf(m))
	scheduler.registered(next[*ipc.Registered](scheduler))
	for rank := range m.World {
		one := *m
		one.Rank, one.Held = rank, []uint32{rank % m.Shards}
		w := r.dial()
		answer = w.registered(w.registerWorker(&one))
		workers = append(workers, w)
	}
	return scheduler, workers, answer
}

// section names blocks 0 to n-1 by a chain.
func section(hashes []byte, firstBlock uint32) ipc.Section {
	n := len(hashes) / 32
	blocks := make([]byte, 0, n*4)
	for i := range n {
		blocks = binary.LittleEndian.AppendUint32(blocks, firstBlock+uint32(i))
	}
	return ipc.Section{HashLen: 32, Hashes: hashes, Blocks: blocks}
}

// save saves a chain from the engine's blocks, which need no step, and gives the statuses.
func (c *client) save(epoch uint32, hashes []byte, firstBlock uint32) []byte {
	c.t.Helper()
	c.job++
	c.send(&ipc.Save{Job: c.job, Epoch: epoch, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(hashes, firstBlock)}})
	return c.done(c.job)
}

// load brings a chain into the engine's blocks.
func (c *client) load(epoch uint32, lease uint64, hashes []byte, firstBlock uint32) []byte {
	c.t.Helper()
	c.job++
	c.send(&ipc.Load{Job: c.job, Epoch: epoch, Event: ipc.None, Lease: lease,
		Sections: []ipc.Section{section(hashes, firstBlock)}})
	return c.done(c.job)
}

func (c *client) done(job uint64) []byte {
	c.t.Helper()
	d := next[*ipc.Done](c)
	if d.Job != job {
		c.t.Fatalf("DONE of job %d, want job %d", d.Job, job)
	}
	return d.Status
}

// block returns the memory of an engine's block.
func (c *client) block(b int) []byte { return c.kv.Mem[b*testBlockBytes : (b+1)*testBlockBytes] }

// fill gives a block bytes that say which it is.
func (c *client) fill(b int, v byte) {
	for i, p := 0, c.block(b); i < len(p); i++ {
		p[i] = v ^ byte(i)
	}
}

func (c *client) filled(b int, v byte) bool {
	for i, got := range c.block(b) {
		if got != v^byte(i) {
			return false
		}
	}
	return true
}

func all(status []byte, want uint8) bool {
	for _, s := range status {
		if s != want {
			return false
		}
	}
	return len(status) > 0
}

func contains(err error, part string) bool { return err != nil && strings.Contains(err.Error(), part) }
