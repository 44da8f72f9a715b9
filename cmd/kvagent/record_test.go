package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/trace"
)

// What engines ask is written as a trace, which kvbench reads, until record is interrupted.
func TestRecord(t *testing.T) {
	_, dir, _ := startServe(t)
	out := filepath.Join(t.TempDir(), "monday")
	cmd, log := kvagentCommand(t, "record", "--out", out, "--json", "--socket-dir", dir), &processLog{}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	file := filepath.Join(out, "trace-000001.jsonl")
	pooltest.Until(t, "a request is recorded", func() bool {
		if text, code := kvagentOutput(t, "mock", "--requests", "3",
			"--socket-dir", dir); code != 0 {
			t.Fatalf("mock: exit %d: %s", code, text)
		}
		info, err := os.Stat(file)
		return err == nil && info.Size() > 0
	})
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(log.String(), `"dropped":0,"removed":0`) {
		t.Errorf("%v: %s", err, log)
	}
	requests, err := trace.Read(file, 0)
	if err != nil || len(requests) == 0 || len(requests[0].HashIDs) == 0 {
		t.Errorf("%d requests, %v", len(requests), err)
	}
	for args, want := range map[string]string{
		"--out " + out: "file exists", "": "out: not given", "--out x --total-bytes 1": "total-bytes",
	} {
		args := append([]string{"record", "--socket-dir", dir}, strings.Fields(args)...)
		if text, code := kvagentOutput(t, args...); code == 0 || !strings.Contains(text, want) {
			t.Errorf("%q: exit %d: %s", args, code, text)
		}
	}
}

// Of more than the limit the oldest files go, and a disk without room ends the recording alone,
// with whole lines.
func TestRecordingIsBounded(t *testing.T) {
	r := &recorder{dir: t.TempDir(), total: 1000}
	line := []byte(`{"timestamp":1,"input_length":16,"output_length":0,"hash_ids":[1,2,3]}`)
	for range 100 {
		if err := r.add(line); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.add([]byte(`{"dropped":7}`)); err != nil || r.Dropped != 7 || r.Requests != 100 {
		t.Errorf("%v: %+v", err, r)
	}
	files, _ := filepath.Glob(filepath.Join(r.dir, "*"))
	bytes, requests := int64(0), uint64(0)
	for _, path := range files {
		info, err := os.Stat(path)
		if err != nil || info.Size() > 250 {
			t.Errorf("%s: %v, %v", path, info, err)
		}
		bytes += info.Size()
		all, err := trace.Read(path, 0)
		if requests += uint64(len(all)); err != nil {
			t.Error(err)
		}
	}
	if bytes > 1000 || requests != r.Requests-r.Removed || len(files) != len(r.files) {
		t.Errorf("%d bytes, %d requests in %d files: %+v", bytes, requests, len(files), r)
	}
	full := &recorder{dir: t.TempDir(), total: 1 << 20}
	if err := full.add(line); err != nil {
		t.Fatal(err)
	}
	whole := full.last().bytes
	if err := full.file.Close(); err != nil { // as if the disk were gone
		t.Fatal(err)
	}
	if err := full.add(line); err == nil || full.last().bytes != whole {
		t.Errorf("%v: %+v", err, full)
	}
}
