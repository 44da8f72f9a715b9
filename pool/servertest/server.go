// Package servertest runs the real servers that tests of shared stores need. Each is a process on a
// free port of the loopback address that can be killed, paused and restarted.
package servertest

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// RequireEnv is the environment variable that, if set, makes a missing server a failure instead of
// a skip.
const RequireEnv = "KVAGENT_REQUIRE_SERVERS"

const startTimeout = 20 * time.Second

// Server is a server process of a test. Its data is in a directory of the test and survives
// restarts.
type Server struct {
	Addr string // host:port
	Dir  string
	// Admin is the host:port of a Mooncake master's metrics.
	Admin string

	t       testing.TB
	program string
	args    []string
	env     []string
	cmd     *exec.Cmd
	output  bytes.Buffer
}

// find returns a program's path. If the program is missing it skips the test, or fails it if
// servers are required.
func find(t testing.TB, program, install string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	text := fmt.Sprintf("%s is not installed: %s", program, install)
	if os.Getenv(RequireEnv) != "" {
		t.Fatal(text)
	}
	t.Skip("SKIPPED, " + text)
	return ""
}

// FreeAddr returns a loopback address on which nothing listens.
func FreeAddr(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// newServer returns a server of a program, which is not started, on a free port.
func newServer(t testing.TB, program, install string) *Server {
	t.Helper()
	return &Server{t: t, program: find(t, program, install), Addr: FreeAddr(t), Dir: t.TempDir()}
}

func (s *Server) port() string {
	_, port, _ := net.SplitHostPort(s.Addr)
	return port
}

// run starts the server with its arguments.
func (s *Server) run(args ...string) {
	s.t.Helper()
	s.args = args
	s.t.Cleanup(s.Kill)
	s.start()
}

// start runs the program and waits until it accepts connections. The end of the test kills it.
func (s *Server) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.program, s.args...)
	s.cmd.Dir, s.cmd.Env = s.Dir, append(os.Environ(), s.env...)
	s.cmd.Stdout, s.cmd.Stderr = &s.output, &s.output
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	for end := time.Now().Add(startTimeout); ; {
		nc, err := net.DialTimeout("tcp", s.Addr, time.Second)
		if err == nil {
			nc.Close()
			return
		}
		if time.Now().After(end) {
			s.Kill()
			s.t.Fatalf("%s does not listen on %s: %v\n%s", s.program, s.Addr, err, s.output.String())
		}
		time.Sleep(5 * time.Millisecond) // there is no event for another process's listen
	}
}

// Command returns the command line of the server, with blanks, for others to start.
func (s *Server) Command() string { return strings.Join(append([]string{s.program}, s.args...), " ") }

// Kill sends SIGKILL and waits until the process has ended.
func (s *Server) Kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Setenv sets an environment variable for the next start.
func (s *Server) Setenv(name, value string) { s.env = append(s.env, name+"="+value) }

// Restart starts a killed process again with the same address and data.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	s.start()
}

// Pause stops the process (SIGSTOP) and returns when none of its threads runs. Its sockets stay
// open without answering.
func (s *Server) Pause() {
	s.t.Helper()
	s.signal(syscall.SIGSTOP)
	AwaitStop(s.t, s.cmd.Process.Pid)
}

// AwaitStop waits until a child that was sent SIGSTOP has stopped. A thread on another processor
// runs on until it takes the signal, and may answer one more call. The kernel reports the stop of
// the last thread to the parent (waitid(2), WSTOPPED).
func AwaitStop(t testing.TB, pid int) {
	t.Helper()
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WSTOPPED|unix.WNOWAIT, nil)
		if err == nil {
			return
		}
		if err != unix.EINTR {
			t.Fatalf("process %d does not stop: %v", pid, err)
		}
	}
}

// Resume continues a paused process.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}
