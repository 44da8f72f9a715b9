package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// TestRanksOfManyShards: TP 8 x PP 4 of a model with a KV head for each rank, with two ranks for
// each, and the most ranks. An engine of the shape saves, another of it finds and loads. A block
// is found when the last shard is there, and not before.
func TestRanksOfManyShards(t *testing.T) {
	for _, shape := range []struct{ ranks, shards uint32 }{{32, 32}, {32, 16}, {ipc.MaxWorld, ipc.MaxWorld}} {
		t.Run(fmt.Sprintf("%d ranks, %d shards", shape.ranks, shape.shards), func(t *testing.T) {
			r := newRig(t, withPool(16<<20))
			reg := register("saver")
			reg.World, reg.Shards, reg.LookupName = shape.ranks, shape.shards, "look"
			_, savers, answer := r.joinEngine(reg)
			look, hashes := r.asker("look"), chain(1, 2)
			question := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: hashes}
			for rank := range shape.shards {
				if got := ask(t, look, question); got.Tokens != 0 || got.Status != ipc.LookupHit {
					t.Fatalf("found with %d of %d shards: %+v", rank, shape.shards, got)
				}
				for b := range 2 {
					savers[rank].fill(b, byte(2*rank)+byte(b))
				}
				if got := savers[rank].save(answer.Epoch, hashes, 0); !all(got, blockOK) {
					t.Fatalf("save of rank %d: %v", rank, got)
				}
			}
			if got := ask(t, look, question); got.Tokens != 2*testBlockTokens {
				t.Fatalf("looked up %+v, want %d tokens", got, 2*testBlockTokens)
			}
			reg = register("loader")
			reg.World, reg.Shards = shape.ranks, shape.shards
			_, loaders, _ := r.joinEngine(reg)
			for rank, one := range loaders {
				if got := one.load(answer.Epoch, 0, hashes, 4); !all(got, blockOK) {
					t.Fatalf("load of rank %d: %v", rank, got)
				}
				for b := range 2 {
					if !one.filled(4+b, byte(2*(rank%int(shape.shards))+b)) {
						t.Errorf("rank %d, block %d: other bytes than were saved of its shard", rank, b)
					}
				}
			}
		})
	}
}

// TestWorkersWithAllShards: 64 workers hold four of 256 shards each, and one that holds all 256
// loads what they saved.
func TestWorkersWithAllShards(t *testing.T) {
	r := newRig(t, withPool(32<<20))
	const part = testBlockBytes / ipc.MaxShards // bytes of a shard
	join := func(name string, rank, world uint32) *client {
		m, c := register(name), r.dial()
		each := ipc.MaxShards / world
		regions, fds, segments := c.prepare(m)
		m.Rank, m.World, m.Shards, m.Held, m.Segments = rank, world, ipc.MaxShards, nil, each
		for i := range each {
			m.Held = append(m.Held, rank*each+i)
		}
		c.send(m)
		c.send(regions, fds...)
		for i, shard := range m.Held { // of its block's bytes, where they are in the whole model's
			list := []ipc.SegmentDesc{segments.List[0]}
			list[0].Offset, list[0].Bytes = uint64(rank*each+uint32(i))*part, part
			c.send(&ipc.Segments{Req: m.Req, Shard: shard, List: list})
		}
		c.registered(next[*ipc.Registered](c))
		return c
	}
	var many []*client
	for rank := range uint32(ipc.MaxWorld) {
		many = append(many, join("many", rank, ipc.MaxWorld))
	}
	hashes := chain(3, 2)
	for rank, c := range many {
		for b := range 2 {
			c.fill(b, byte(b+5))
		}
		if got := c.save(1, hashes, 0); !all(got, blockOK) {
			t.Fatalf("save of rank %d: %v", rank, got)
		}
	}
	one := join("one", 0, 1)
	if got := one.load(1, 0, hashes, 8); !all(got, blockOK) {
		t.Fatalf("load: %v", got)
	}
	for b := range 2 {
		if !one.filled(8+b, byte(b+5)) {
			t.Errorf("block %d: other bytes than were saved", b)
		}
	}
}

// TestTooManyShards: a registration of 257 shards ends the session with the range.
func TestTooManyShards(t *testing.T) {
	r := newRig(t)
	var d net.Dialer
	conn, err := d.DialContext(t.Context(), "unix", r.path(socketdir.Session))
	check(t, err)
	defer func() { check(t, conn.Close()) }()
	check(t, conn.SetDeadline(time.Now().Add(patience)))
	m := schedulerOf(register("a"))
	m.Shards = ipc.MaxShards
	most, err := ipc.Encode(nil, m)
	check(t, err)
	more := bytes.Replace(most, []byte("\xcd\x01\x00"), []byte("\xcd\x01\x01"), 1) // msgpack's 256 and 257
	hello, err := ipc.Encode(nil, &ipc.Hello{MinVersion: ipc.Version, MaxVersion: ipc.Version})
	check(t, err)
	for _, payload := range [][]byte{hello, more} {
		_, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...))
		check(t, err)
	}
	var said bytes.Buffer
	_, err = said.ReadFrom(conn) // until the agent closes its end
	check(t, err)
	if got := said.String(); !strings.Contains(got, "257") || !strings.Contains(got, "1 to 256") {
		t.Errorf("%q, want an error that says 257 and 1 to 256", got)
	}
}
