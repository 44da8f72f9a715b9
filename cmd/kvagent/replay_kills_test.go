package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/lab/replay"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// Agents of every node die, one after the other, and the one that died is the one that is waited
// for and started again.
func TestReplayKillsAgentsOfEveryNode(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: several nodes")
	}
	for _, nodes := range []string{"2", "3"} {
		o := replayJSON(t, "requests: 240", "nodes: "+nodes, "kill-agent-every: 40",
			"kill-engine-every: 57", "pause-agent-every: 90", "pause-engine-every: 70",
			"pause-for: 300ms", "stalled-after: 60s")
		o.clean(t)
		if o.EngineKills == 0 || o.AgentPauses == 0 || o.EnginePauses == 0 {
			t.Errorf("%s nodes: %d engine kills, %d pauses of agents, %d of engines", nodes, o.EngineKills,
				o.AgentPauses, o.EnginePauses)
		}
		for node, kills := range o.AgentKillsNode {
			if kills == 0 {
				t.Errorf("%s nodes: the agent of node %d was not killed: %v", nodes, node, o.AgentKillsNode)
			}
		}
	}
}

// A server that the replay starts is killed and stopped, too.
func TestReplayKillsItsServer(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	server, spec := redisCommand(t)
	o := replayJSON(t, "requests: 300", "pace: 4s", "nodes: 2", "shared: "+spec, "server: "+server,
		"tiers-within: 20s", "pool: 24MiB", "engine-blocks: 600", "kill-server-every: 110",
		"pause-server-every: 70", "server-down: 200ms", "pause-for: 500ms", "kill-agent-every: 90")
	o.clean(t)
	if o.ServerKills == 0 || o.ServerPauses == 0 || o.AgentKills == 0 {
		t.Errorf("the server was killed %d and stopped %d times, agents were killed %d times", o.ServerKills,
			o.ServerPauses, o.AgentKills)
	}
}

// redisCommand is the command line of a server on a free port of loopback, and the server as a
// tier.
func redisCommand(t *testing.T) (command, spec string) {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv(servertest.RequireEnv) != "" {
			t.Fatal(err)
		}
		t.Skip("SKIPPED: no redis-server in the path; install the package redis-server")
	}
	addr := servertest.FreeAddr(t)
	_, port, _ := net.SplitHostPort(addr)
	conf := filepath.Join(t.TempDir(), "redis.conf")
	if err := os.WriteFile(conf, []byte("bind 127.0.0.1\nport "+port+"\nsave \"\"\nappendonly no\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	return "exec " + program + " " + conf, "redis://" + addr + "?within=1s"
}

// startedReplay is a replay that runs, with everything that it started: by a variable that all
// inherit, and by their parent, because a redis-server writes its name over its environment.
type startedReplay struct {
	cmd  *exec.Cmd
	log  bytes.Buffer
	mark string
	over chan struct{}
}

func startReplay(t *testing.T, settings ...string) *startedReplay {
	t.Helper()
	mark := fmt.Sprintf("KVAGENT_TEST_LAB=%d", time.Now().UnixNano())
	l := &startedReplay{mark: mark, over: make(chan struct{})}
	l.cmd = kvagentCommand(t, "replay", "--trace", sliceOfTrace, "--json", "--scenario", scenarioFile(t, settings...))
	l.cmd.Env = append(l.cmd.Env, l.mark)
	l.cmd.Stdout, l.cmd.Stderr = &l.log, &l.log
	l.cmd.WaitDelay = time.Second
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = l.cmd.Wait() // its exit code is in ProcessState
		close(l.over)
	}()
	t.Cleanup(func() {
		_ = l.cmd.Process.Kill() // it has ended, if the test did what it should
		<-l.over
	})
	return l
}

// processes returns the command lines of all processes but the replay itself.
func (l *startedReplay) processes() map[int]string {
	all := child.Marked(l.mark)
	for _, pid := range childrenOf(l.cmd.Process.Pid) {
		all[pid] = child.CommandLine(pid)
	}
	delete(all, l.cmd.Process.Pid)
	return all
}

// childrenOf returns the numbers of the processes whose parent is pid.
func childrenOf(pid int) (all []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is well-formed
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(b), ") ") // proc(5): state and parent come after the name
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			all = append(all, child)
		}
	}
	return all
}

// await waits until the lab has a process that is looked for, and gives its number.
func (l *startedReplay) await(t *testing.T, what string, found func(pid int, command string) bool) (pid int) {
	t.Helper()
	pooltest.Until(t, "there is "+what, func() bool {
		over := false
		select {
		case <-l.over:
			over = true
		default:
		}
		for number, command := range l.processes() {
			if found(number, command) {
				pid = number
				return true
			}
		}
		if over {
			t.Fatalf("the replay was over before there was %s\n%s", what, l.log.String())
		}
		return false
	})
	return pid
}

// left returns what is left of the lab, and of some processes.
func (l *startedReplay) left(all map[int]string) map[int]string {
	left := child.Marked(l.mark)
	for pid := range all {
		if command := child.CommandLine(pid); command != "" { // a zombie has none
			left[pid] = command
		}
	}
	return left
}

// gone fails if anything of the lab is left, or any of some processes.
func (l *startedReplay) gone(t *testing.T, all map[int]string) {
	t.Helper()
	if left := l.left(all); len(left) > 0 {
		t.Fatalf("left are %v\n%s", left, l.log.String())
	}
}

// stopped reports whether a process stands still.
func stopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(b), ") ")
	return err == nil && strings.HasPrefix(rest, "T")
}

// A replay that is told to end does so, in the time that is said, with agents and engines that
// stand still or are being killed, and leaves no process. One that is killed leaves none either.
func TestReplayEndsWithAllItStarted(t *testing.T) {
	server, spec := redisCommand(t)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			l := startReplay(t, "nodes: 2", "engines: 3", "pace: 10m", "shared: "+spec, "server: "+server,
				"kill-agent-every: 7", "pause-agent-every: 5",
				"pause-engine-every: 6", "pause-server-every: 4", "pause-for: 1m")
			for what, is := range map[string]string{"a stopped agent": " serve ", "a stopped engine": " mock ",
				"a stopped server": "redis-server"} {
				l.await(t, what, func(pid int, command string) bool {
					return strings.Contains(command, is) && stopped(pid)
				})
			}
			all, began := l.processes(), time.Now()
			if err := l.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			<-l.over
			if took := time.Since(began); took > replay.EndsWithin {
				t.Errorf("it ended %v after %v, allowed: %v", took, sig, replay.EndsWithin)
			}
			if text := l.log.String(); strings.Contains(text, "not over") || strings.Contains(text, "is left") {
				t.Errorf("it did not end by itself:\n%s", text)
			}
			if sig == syscall.SIGKILL { // nobody has waited for them
				pooltest.Until(t, "nothing of the lab is left", func() bool { return len(l.left(all)) == 0 })
			}
			l.gone(t, all)
		})
	}
}

// A replay that comes to a halt says what it waits for, and leaves no process.
func TestReplayNamesWhatItWaitsFor(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a replay that stands still")
	}
	l := startReplay(t, "nodes: 2", "stalled-after: 1s", "pace: 1m")
	engine := l.await(t, "an engine", func(_ int, command string) bool { return strings.Contains(command, " mock ") })
	if err := syscall.Kill(engine, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	<-l.over
	text := l.log.String()
	for _, want := range []string{"stalled-after: nothing was reported for 1s; waiting for engine ",
		fmt.Sprintf("(process %d, node ", engine), " to end its stretch"} {
		if !strings.Contains(text, want) {
			t.Errorf("not in the output: %q\n%s", want, text)
		}
	}
	if code := l.cmd.ProcessState.ExitCode(); code != exitFailed {
		t.Errorf("exit %d, want %d", code, exitFailed)
	}
	l.gone(t, nil)
}

// A server that ends by itself ends the replay.
func TestReplayServerEnds(t *testing.T) {
	out, code := kvagentOutput(t, "replay", "--trace", sliceOfTrace, "--requests", "50", "--pace", "1h", "--scenario",
		scenarioFile(t, "shared: redis://127.0.0.1:1", "server: exec /bin/false"))
	if want := "server: exec /bin/false ended unexpectedly"; code != exitFailed || !strings.Contains(out,
		want) {
		t.Errorf("exit %d, want %d and %q\n%s", code, exitFailed, want, out)
	}
}
