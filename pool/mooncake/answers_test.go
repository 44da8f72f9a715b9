package mooncake

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// liar is between a helper and its master. It alters one of the master's answers.
type liar struct {
	addr string
	next atomic.Pointer[lie] // instead of the next answer
	told atomic.Int64        // lies that ended
}

// lie is an answer of which some bits are inverted, and what follows it, again and again, as long
// as anything reads it; empty: nothing.
type lie struct{ bits, then string }

func (l *lie) tell(w io.Writer, answer []byte) {
	answer = append(answer, make([]byte, max(len(l.bits)-len(answer), 0))...)
	for i := range l.bits {
		answer[i] ^= l.bits[i]
	}
	_, err := w.Write(answer)
	for then := bytes.Repeat([]byte(l.then), 1<<16); len(then) > 0 && err == nil; {
		_, err = w.Write(then)
	}
}

func newLiar(t testing.TB, master string) *liar {
	s := &liar{}
	s.addr = servertest.Listen(t, func(nc net.Conn) {
		to, err := net.Dial("tcp", master)
		if err != nil {
			return
		}
		defer to.Close()
		go func() {
			_, _ = io.Copy(to, nc)
			to.Close()
		}()
		answer := make([]byte, 64<<10)
		for {
			n, err := to.Read(answer)
			if err != nil {
				return
			}
			if lie := s.next.Swap(nil); lie != nil {
				if nc.SetWriteDeadline(time.Now().Add(2*time.Second)) == nil { // if nothing reads
					lie.tell(nc, answer[:n])
				}
				s.told.Add(1)
				return
			}
			if _, err := nc.Write(answer[:n]); err != nil {
				return
			}
		}
	})
	return s
}

// liedTo returns the options of a store whose helper asks a master through a liar. It adds nothing
// to the shared store.
func liedTo(t testing.TB) (Options, *liar) {
	master, python := servertest.Mooncake(t)
	l := newLiar(t, master.Addr)
	o := options(t, master, python)
	o.Master, o.Segment, o.Silence, o.SetupWithin, o.OnState = l.addr, 0, 2*time.Second, 5*time.Second, nil
	return o, l
}

// believe gives a store a lie instead of an answer of the master, to a question or to the first one
// of a helper, and expects the store to serve after it and its helpers never to use more memory
// than they may.
func believe(t *testing.T, s *Store, master *liar, first bool, told lie) {
	before := master.told.Load()
	master.next.Store(&told)
	if h, _ := s.current(); first && h != nil {
		h.kill()
	}
	var most int64
	pooltest.Until(t, "the master has lied, and the store serves again", func() bool {
		if h, _ := s.current(); h != nil {
			most = max(most, peak(t, h))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := s.Exists(ctx, []pool.Key{pooltest.Block(1, 1).Key}, make([]pool.Status, 1))
		return err == nil && master.told.Load() > before
	})
	if most > s.memory+2*servertest.MaxAllocated {
		t.Errorf("a helper used %d bytes, allowed: %d", most, s.memory)
	}
}

// peak is the most memory that a helper has used, also of files and in common with others, bytes.
func peak(t *testing.T, h *helper) (bytes int64) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", h.cmd.Process.Pid)) // none: it has ended
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, "VmHWM:"); found {
			if _, err := fmt.Sscan(rest, &bytes); err != nil {
				t.Error(err)
			}
		}
	}
	return bytes << 10
}

// lies alter the head of Mooncake's RPC: magic, version, error, type, number, length, and the
// length of what is attached.
var lies = []lie{
	{strings.Repeat("\x00", 12) + "\xff\xff\xff\xff", "x"}, {strings.Repeat("\x00", 8) + "\xff\xff\xff\xff", "x"},
	{"\x01", "x"}, {"\x00\x00\xff", ""}, {"\x00\x00\x00\x00\xff", "\x00"}, {"", "\xff"},
	{strings.Repeat("\x00", 16) + "\xff\xff\xff\xff\xff\xff\xff\xff", ""},
	{strings.Repeat("\x00", 8) + "\x00\x00\x10" + strings.Repeat("\x00", 5) + strings.Repeat("\x7f", 64), "\x7f"},
}

// TestMasterLies gives each wrong answer.
func TestMasterLies(t *testing.T) {
	o, master := liedTo(t)
	s := openWith(t, o)
	for i, lie := range lies {
		if testing.Short() && i > 0 {
			break
		}
		t.Run(fmt.Sprint(i), func(t *testing.T) { believe(t, s, master, false, lie) })
		if i < 2 { // pauses between helpers grow
			t.Run(fmt.Sprint(i, " first"), func(t *testing.T) { believe(t, s, master, true, lie) })
		}
	}
}

// FuzzMaster is the same for anything.
func FuzzMaster(f *testing.F) {
	for i, lie := range lies {
		f.Add(i == 0, lie.bits, lie.then)
	}
	o, master := liedTo(f)
	var s *Store
	f.Cleanup(func() {
		if s != nil {
			s.Close()
		}
	})
	f.Fuzz(func(t *testing.T, first bool, bits, then string) {
		if s != nil && s.count[countStarts].Load() > 3 { // the pauses between its helpers have become long
			s.Close()
			s = nil
		}
		if s == nil {
			var err error
			if s, err = Open(o); err != nil {
				t.Fatal(err)
			}
		}
		believe(t, s, master, first, lie{bits, then})
	})
}
