package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"testing"

	zmq "github.com/pebbe/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
)

// foreign is a client that knows nothing of this project: a plain REQ socket.
type foreign struct {
	t   *testing.T
	soc *zmq.Socket
}

func (r *rig) foreign(t *testing.T, name string) *foreign {
	t.Helper()
	z, err := zmq.NewContext()
	check(t, err)
	soc, err := z.NewSocket(zmq.REQ)
	check(t, err)
	check(t, soc.SetLinger(0))
	check(t, soc.SetRcvtimeo(patience))
	check(t, soc.Connect("ipc://"+r.path(name)))
	t.Cleanup(func() {
		check(t, soc.Close())
		check(t, z.Term())
	})
	return &foreign{t, soc}
}

func (f *foreign) ask(frames ...[]byte) []byte {
	f.t.Helper()
	parts := make([]any, len(frames))
	for i := range frames {
		parts[i] = frames[i]
	}
	_, err := f.soc.SendMessage(parts...)
	check(f.t, err)
	reply, err := f.soc.RecvMessageBytes(0)
	check(f.t, err)
	if len(reply) != 1 {
		f.t.Fatalf("%d frames, want 1", len(reply))
	}
	return reply[0]
}

func be32(n uint32) []byte { return binary.BigEndian.AppendUint32(nil, n) }
func be16(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }
func le64(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

func packed(t *testing.T, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	check(t, err)
	return b
}

func hexHashes(blob []byte) (out []string) {
	for ; len(blob) > 0; blob = blob[32:] {
		out = append(out, hex.EncodeToString(blob[:32]))
	}
	return out
}

// Foreign clients against a filled pool: all forms on one socket, whole blocks, never more than the
// prompt.
func TestForeignForms(t *testing.T) {
	r := newRig(t)
	const name = "lookup_rpc_port_0_dp_rank0"
	reg := register("a")
	reg.LookupName = name
	_, w, _ := r.joinEngine(reg)
	stored := chain(1, 5)
	if got := w[0].save(1, stored, 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	asked := chain(1, 8) // three more than are stored
	f := r.foreign(t, name)
	hashes, groups := packed(t, hexHashes(asked)), packed(t, []int{0})
	simple := func(tokens uint64) [][]byte {
		frames := [][]byte{le64(tokens)}
		for i := range 8 {
			frames = append(frames, asked[i*32:(i+1)*32])
		}
		return frames
	}
	for _, c := range []struct {
		form   string
		frames [][]byte
		want   []byte
	}{
		{"ascend2", [][]byte{be32(200), hashes}, be32(80)},
		{"ascend2, whole prompt", [][]byte{be32(80), hashes}, be32(80)},
		{"ascend2, token_len in a block", [][]byte{be32(70), hashes}, be32(64)},
		{"ascend3", [][]byte{be32(200), groups, hashes}, be32(80)},
		{"ascend3, no such group", [][]byte{be32(200), packed(t, []int{3}), hashes}, be32(0)},
		{"ascend4", [][]byte{be32(200), groups, be32(32), hashes}, be32(80)},
		{"ascend4, all in HBM", [][]byte{be32(200), groups, be32(80), hashes}, be32(0)},
		{"ascend2, nothing stored", [][]byte{be32(200), packed(t, hexHashes(chain(9, 2)))}, be32(0)},
		{"ascend2, upper case", [][]byte{be32(200), packed(t, []string{"AB"})}, be32(0)},
		{"upstream", [][]byte{[]byte("lookup"), be32(200), be16(32), asked}, be32(80)},
		{"upstream, num_tokens", [][]byte{[]byte("lookup"), be32(33), be16(32), asked}, be32(32)},
		{"simple", simple(200), le64(5)},
		{"simple, tokens", simple(40), le64(2)},
		{"malformed", [][]byte{[]byte("?")}, be32(0)},
		{"malformed own", [][]byte{append([]byte{0x9d, ipc.Version}, make([]byte, 20)...)}, nil},
	} {
		got := f.ask(c.frames...)
		if c.want != nil && !bytes.Equal(got, c.want) {
			t.Errorf("%s: %x, want %x", c.form, got, c.want)
		}
		if c.want == nil {
			if reply, err := ipc.DecodeReply(got); err != nil || reply.Status != ipc.LookupMalformed {
				t.Errorf("%s: %+v, %v", c.form, reply, err)
			}
		}
	}
	off, on := false, true
	r.agent.Set(&off, nil)
	if got := f.ask(be32(200), hashes); !bytes.Equal(got, be32(0)) {
		t.Errorf("loads off: %x", got)
	}
	r.agent.Set(&on, nil)
	if got := f.ask([]byte("reset")); !bytes.Equal(got, []byte{1}) {
		t.Errorf("reset: %x", got)
	}
	if got := f.ask(be32(200), hashes); !bytes.Equal(got, be32(0)) {
		t.Errorf("after the reset: %x", got)
	}
	if got := next[*ipc.Epoch](w[0]); got.Epoch != 2 {
		t.Errorf("EPOCH %+v", got)
	}
}

// No look-up is promised anything of an engine whose ranks are not all registered.
func TestLookupNeedsAllRanks(t *testing.T) {
	r := newRig(t)
	reg := register("tp2")
	reg.World, reg.Shards, reg.LookupName = 2, 2, "look"
	scheduler, w, answer := r.joinEngine(reg)
	for _, one := range w {
		one.save(1, chain(1, 2), 0)
	}
	f, look, general := r.foreign(t, "look"), r.asker("look"), r.asker(socketdir.Lookup)
	q := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: chain(1, 2)}
	named := q
	named.Space, named.Session, named.Want = answer.Space, scheduler.welcome.Session, ipc.WantReserve
	ascend := [][]byte{be32(200), packed(t, hexHashes(q.Hashes))}
	if got := f.ask(ascend...); !bytes.Equal(got, be32(32)) {
		t.Fatalf("all ranks: %x", got)
	}
	if got := ask(t, general, q); got.Status != ipc.LookupNotRegistered {
		t.Errorf("lookup.sock without a space: %+v", got)
	}
	wrong := named
	wrong.Space[0] ^= 1
	if got := ask(t, general, wrong); got.Status != ipc.LookupNotRegistered {
		t.Errorf("no such space: %+v", got)
	}
	if got := ask(t, general, named); got.Lease == 0 {
		t.Errorf("all ranks: %+v", got)
	}
	w[1].close()
	r.waitFor("rank 1 is gone", func(s admin.Status) bool { return s.Sessions == 2 })
	if got := f.ask(ascend...); !bytes.Equal(got, be32(0)) {
		t.Errorf("one rank missing: %x", got)
	}
	for name, c := range map[string]*mockengine.LookupClient{"its socket": look, "lookup.sock": general} {
		if got := ask(t, c, named); got.Status != ipc.LookupNotRegistered || got.Tokens != 0 || got.Lease != 0 {
			t.Errorf("one rank missing, %s: %+v", name, got)
		}
	}
	_, other, _ := r.joinEngine(func() *ipc.Register { m := register("whole"); m.World, m.Shards = 2, 2; return m }())
	if got := ask(t, look, q); got.Status != ipc.LookupHit {
		t.Errorf("another engine of the space is whole: %+v", got)
	}
	anonymous := named
	anonymous.Session, anonymous.Want = 0, ipc.WantProbe
	if got := ask(t, general, anonymous); got.Status != ipc.LookupHit || got.Tokens != 32 {
		t.Errorf("lookup.sock asks for any engine of the space: %+v", got)
	}
	_ = other
}

// Engines of one space share a socket; it goes with the last of them.
func TestSharedLookupSocket(t *testing.T) {
	r := newRig(t)
	reg := register("a")
	reg.LookupName = "shared"
	schedulerA, a, _ := r.joinEngine(reg)
	second := register("b")
	second.LookupName = "shared"
	schedulerB, b, answer := r.joinEngine(second)
	if answer.LookupPath != r.path("shared") {
		t.Errorf("lookup_path %q", answer.LookupPath)
	}
	a[0].save(1, chain(1, 2), 0)
	q := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: chain(1, 2)}
	for _, c := range []*client{schedulerA, a[0]} {
		c.close()
	}
	r.waitFor("engine a is gone", func(s admin.Status) bool { return s.Engines == 1 })
	if got := ask(t, r.asker("shared"), q); got.Tokens != 2*testBlockTokens {
		t.Errorf("the socket of the engine that stays: %+v", got)
	}
	for _, c := range []*client{schedulerB, b[0]} {
		c.close()
	}
	r.waitFor("only the agent's own socket is open", func(admin.Status) bool {
		_, err := os.Lstat(r.path("shared"))
		return errors.Is(err, fs.ErrNotExist)
	})
}
