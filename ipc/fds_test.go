package ipc

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func openFDs(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func memfd(t testing.TB, content string) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if _, err := unix.Write(fd, []byte(content)); err != nil {
		t.Fatal(err)
	}
	return fd
}

func regionsWith(n int) (m *Regions) {
	m = &Regions{Req: 1, List: []RegionDesc{{ID: 999, Kind: RegionPeer, Size: 1}}}
	for i := range n {
		m.List = append(m.List, RegionDesc{ID: uint32(i), Kind: RegionFD, Size: 1})
	}
	return m
}

// The most descriptors that a message can have arrive in order, closed on exec.
func TestDescriptors(t *testing.T) {
	agent, client := sessionPair(t)
	const n = MaxRegionsMessage - 1
	var fds []int
	for i := range n {
		fds = append(fds, memfd(t, fmt.Sprint(i)))
	}
	if err := client.Send(regionsWith(n), fds...); err != nil {
		t.Fatal(err)
	}
	m, got, err := agent.Recv()
	if err != nil || len(got) != n || m.(*Regions).Descriptors() != n {
		t.Fatalf("%d descriptors, %v", len(got), err)
	}
	defer closeAll(got)
	for i, fd := range got {
		var b [8]byte
		size, err := unix.Pread(fd, b[:], 0)
		if err != nil || string(b[:size]) != fmt.Sprint(i) {
			t.Fatalf("descriptor %d reads %q, %v", i, b[:size], err)
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Fatalf("descriptor %d: flags %x, %v, want close-on-exec", i, flags, err)
		}
	}
}

// 300 regions in one message are refused by the sender's and by the receiver's codec.
func TestTooManyDescriptors(t *testing.T) {
	agent, client := sessionPair(t)
	fds := make([]int, 300)
	var m *MalformedError
	if err := client.Send(regionsWith(300), fds...); !errors.As(err, &m) {
		t.Errorf("%v, want a *MalformedError", err)
	}
	if err := client.Send(&Ping{Req: 2}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Errorf("the session did not live on: %v", err)
	}
}

// Descriptors that do not belong are closed, wherever they hang, and end the session.
func TestStrayDescriptors(t *testing.T) {
	ping := frameOf(&Ping{Req: 1})
	two := frameOf(regionsWith(2))
	for name, send := range map[string]struct {
		frame []byte
		at    int // the byte the descriptors hang on
		fds   int
	}{
		"with a ping":         {ping, 0, 1},
		"253 with a ping":     {ping, 0, MaxRegionsMessage},
		"one too many":        {two, 0, 3},
		"one missing":         {two, 0, 1},
		"after the length":    {two, 4, 2},
		"in the body":         {two, 6, 2},
		"on a malformed one":  {[]byte{0, 0, 0, 1, 0xc0}, 0, 2},
		"on half a frame":     {two[:7], 0, 2},
		"on a huge length":    {[]byte{0xff, 0xff, 0xff, 0xff}, 0, 2},
		"on half of a length": {two[:2], 0, 2},
	} {
		agent, raw := rawPair(t)
		before := openFDs(t)
		var fds []int
		for range send.fds {
			fds = append(fds, 0)
		}
		if send.at > 0 {
			raw.Write(send.frame[:send.at])
		}
		if _, _, err := raw.WriteMsgUnix(send.frame[send.at:], unix.UnixRights(fds...), nil); err != nil {
			t.Fatal(err)
		}
		raw.CloseWrite()
		m, got, err := agent.Recv()
		if err == nil || got != nil {
			t.Errorf("%s: accepted %+v with %d descriptors", name, m, len(got))
		}
		if after := openFDs(t); after != before {
			t.Errorf("%s: %d descriptors are open, before %d", name, after, before)
		}
		if strings.HasSuffix(name, "with a ping") && !strings.Contains(fmt.Sprint(err), "PING") {
			t.Errorf("%s: %v, does not name the message", name, err)
		}
	}
}

// Descriptors of a message that came in place of HELLO are closed.
func TestDescriptorsBeforeHello(t *testing.T) {
	agent, raw := rawPair(t)
	before := openFDs(t)
	if _, _, err := raw.WriteMsgUnix(frameOf(regionsWith(10)), unix.UnixRights(make([]int, 10)...), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := ServeHandshake(agent, Welcome{}); err == nil {
		t.Error("accepted")
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open, before %d", after, before)
	}
}

// When the limit of open files is reached the kernel drops descriptors: those that came are closed.
func TestDescriptorLimit(t *testing.T) {
	agent, raw := rawPair(t)
	before := openFDs(t)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: uint64(before + 3), Max: old.Max}
	fds := make([]int, 10)
	if _, _, err := raw.WriteMsgUnix(frameOf(regionsWith(10)), unix.UnixRights(fds...), nil); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	_, got, err := agent.Recv()
	unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	if err == nil || got != nil {
		t.Errorf("accepted with %d descriptors", len(got))
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open, before %d: %v", after, before, err)
	}
	select {
	case <-agent.Dead():
	case <-time.After(testTimeout):
		t.Error("Dead is open")
	}
}
