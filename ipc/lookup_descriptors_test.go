package ipc

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// When no descriptor is free, connections wait, those that stand go on, and nothing aborts.
func TestLookupWithoutDescriptors(t *testing.T) {
	s := serveLookups(t, socketDir(t), "lookup", echoHandler)
	l := dialLookup(t, s.Path())
	defer l.Close()
	ask := func() {
		t.Helper()
		if _, err := l.Ask(&LookupRequest{}, testTimeout); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	low := unix.Rlimit{Cur: uint64(openFDs(t) + 21), Max: old.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	last, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(last)
	conns := connectUntilFull(t, s.Path())
	// the server has no descriptor for this one
	if err := unix.Connect(last, &unix.SockaddrUnix{Name: s.Path()}); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(testTimeout)
	for s.Counters().Waited == 0 {
		if time.Now().After(deadline) {
			t.Fatal("no connection had to wait: the limit was not reached")
		}
		ask()
	}
	for _, nc := range conns {
		nc.Close()
	}
	unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	m := dialLookup(t, s.Path())
	defer m.Close()
	if _, err := m.Ask(&LookupRequest{}, testTimeout); err != nil {
		t.Errorf("a new client afterwards: %v", err)
	}
}

// connectUntilFull takes all descriptors that are left, half of them as the server's.
func connectUntilFull(t *testing.T, path string) (conns []net.Conn) {
	t.Helper()
	for {
		nc, err := net.Dial("unix", path)
		if errors.Is(err, unix.EMFILE) {
			return conns
		}
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, nc)
	}
}
