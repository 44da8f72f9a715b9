package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/settings"
)

// readSettings gives the settings of serve from a command line, an environment and a file.
func readSettings(t *testing.T, args []string, env map[string]string, file string) (*serveSettings, error) {
	t.Helper()
	s := defaultServeSettings()
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	s.addFlags(flags)
	if file != "" {
		path := filepath.Join(t.TempDir(), "kvagent.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	err := settings.Fill(flags, func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	})
	if err == nil {
		err = s.check()
	}
	return s, err
}

// A flag goes before the environment, that before the file, that before the default.
func TestSettingsPrecedence(t *testing.T) {
	const file = "pool: 3GiB\nevent-wait: 3s\nqueue: 3\nlog-level: warn\nallow-uid: [3, 4]\nhttp-any: " +
		"true\nverify-sample: 7\n"
	env := map[string]string{"KVAGENT_POOL": "2GiB", "KVAGENT_EVENT_WAIT": "2s", "KVAGENT_ALLOW_GID": "5,6",
		"KVAGENT_PACE": "1.5GiB/s"}
	s, err := readSettings(t, []string{"--pool", "1.5GiB", "--lookup", "a=" + strings.Repeat("0a", 16), "--lookup",
		"b=" + strings.Repeat("0b", 16)}, env, file)
	if err != nil {
		t.Fatal(err)
	}
	for what, ok := range map[string]bool{
		"pool of the flag":          s.pool == 3<<29,
		"event-wait of the env":     s.eventWait == 2*time.Second,
		"pace of the env":           s.pace == 3<<29,
		"queue of the file":         s.queue == 3,
		"log-level of the file":     s.logLevel == "warn",
		"allow-uid of the file":     slices.Equal(s.allowUIDs, []uint32{3, 4}),
		"allow-gid of the env":      slices.Equal(s.allowGIDs, []uint32{5, 6}),
		"http-any of the file":      s.httpAny,
		"verify-sample of the file": s.verify == 7,
		"integrity of the default":  s.integrity == settings.IntegrityFull,
		"socket-dir of the default": s.socketDir == settings.DefaultSocketDir(),
		"two look-up sockets":       len(s.lookups) == 2 && s.lookups["b"][0] == 0x0b,
	} {
		if !ok {
			t.Errorf("not the %s: %+v", what, s)
		}
	}
	s, err = readSettings(t, nil, map[string]string{"KVAGENT_CONFIG": filepath.Join(t.TempDir(), "none")}, "")
	if err == nil || !strings.Contains(err.Error(), "config") {
		t.Errorf("a file that is not there: %v, %+v", err, s)
	}
	s, err = readSettings(t, []string{"--config", "/dev/zero"}, nil, "")
	if err == nil || !strings.Contains(err.Error(), "config") || !strings.Contains(err.Error(), "allowed") {
		t.Errorf("a file without an end: %v, %+v", err, s)
	}
}

// A misspelt variable is told, and no more than that: clusters make variables for a service called
// kvagent.
func TestUnknownEnvironment(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	defaultServeSettings().addFlags(flags)
	got := settings.UnknownEnv(flags, []string{"KVAGENT_POOOL=1GiB", "KVAGENT_POOL=1GiB", "KVAGENT_HTTP_ANY=true",
		"PATH=/bin", "KVAGENT_PORT=tcp://1.2.3.4:5"})
	if want := []string{"KVAGENT_POOOL", "KVAGENT_PORT"}; !slices.Equal(got, want) {
		t.Errorf("unknown are %q, want %q", got, want)
	}
}

// Errors name the key, the value and what is allowed, wherever the value comes from.
func TestSettingsErrors(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		file string
		want []string
	}{
		"flag":          {[]string{"--pool", "1"}, nil, "", []string{"pool", `"1"`, "allowed: 64KiB to 2TiB"}},
		"size words":    {[]string{"--pool", "lots"}, nil, "", []string{"pool", `"lots"`, "allowed"}},
		"size negative": {[]string{"--pool=-1GiB"}, nil, "", []string{"pool", "allowed"}},
		"size huge":     {[]string{"--pool=9999999999TiB"}, nil, "", []string{"pool", "allowed"}},
		"env": {nil, map[string]string{"KVAGENT_QUEUE": "0"}, "",
			[]string{"KVAGENT_QUEUE", `"0"`, "allowed: 1 to 65536"}},
		"file":          {nil, nil, "event-wait: 1us\n", []string{"event-wait", `"1us"`, "allowed: 1ms to 1h0m0s"}},
		"unknown key":   {nil, nil, "pol: 1GiB\n", []string{"pol", "unknown", "allowed", "pool"}},
		"key twice":     {nil, nil, "pool: 1GiB\npool: 2GiB\n", []string{"pool"}},
		"two documents": {nil, nil, "pool: 1GiB\n---\npool: 2GiB\n", []string{"config", "more than one document"}},
		"mapping":       {nil, nil, "pool: {a: 1}\n", []string{"pool", "mapping"}},
		"no mapping":    {nil, nil, "- pool\n", []string{"config"}},
		"config inside": {nil, nil, "config: x\n", []string{"config", "unknown"}},
		"choice": {[]string{"--integrity", "some"}, nil, "",
			[]string{"integrity", `"some"`, "allowed: full, header"}},
		"pace": {nil, nil, "pace: 3GiB\n", []string{"pace", `"3GiB"`, "allowed: auto, off, or 1MiB/s to 4TiB/s"}},
		"verify-sample": {[]string{"--verify-sample", "-1"}, nil, "",
			[]string{"verify-sample", `"-1"`, "allowed: 0 to 1000000000"}},
		"verify env": {nil, map[string]string{"KVAGENT_VERIFY_SAMPLE": "2000000000"}, "",
			[]string{"KVAGENT_VERIFY_SAMPLE", "allowed: 0 to 1000000000"}},
		"device": {[]string{"--device", "tpu"}, nil, "",
			[]string{"device", "allowed: auto, host, host-mover, cuda"}},
		"bool": {nil, map[string]string{"KVAGENT_LOG_JSON": "maybe"}, "",
			[]string{"KVAGENT_LOG_JSON", `"maybe"`, "allowed: true, false"}},
		"bool flag": {[]string{"--http-any=2"}, nil, "", []string{"http-any", `"2"`, "allowed: true, false"}},
		"directory": {[]string{"--socket-dir", ""}, nil, "", []string{"socket-dir", "allowed: a directory"}},
		"directory long": {nil, map[string]string{"KVAGENT_SOCKET_DIR": "/" + strings.Repeat("d", 94)}, "",
			[]string{"socket-dir", "95 bytes", "allowed: 1 to 94"}},
		"uid": {[]string{"--allow-uid", "1,root"}, nil, "",
			[]string{"allow-uid", `"root"`, "allowed: numbers"}},
		"group": {[]string{"--socket-group", "no such group"}, nil, "",
			[]string{"socket-group", "allowed: the name or the number"}},
		"lookup": {[]string{"--lookup", "a=12"}, nil, "",
			[]string{"lookup", "allowed: NAME=FINGERPRINT with 32 hex digits"}},
		"lookup name": {[]string{"--lookup", "session.sock=" + strings.Repeat("00", 16)}, nil, "",
			[]string{"lookup", "session.sock"}},
		"http": {[]string{"--http", "0.0.0.0:80"}, nil, "",
			[]string{"http", "0.0.0.0:80", "allowed: a loopback address"}},
		"lease-bytes": {[]string{"--pool", "1GiB", "--lease-bytes", "2GiB"}, nil, "",
			[]string{"lease-bytes", "2GiB", "allowed: 0 to 1GiB"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readSettings(t, c.args, c.env, c.file)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

// The defaults that the flags show are those that are used.
func TestEverySettingHasItsFlag(t *testing.T) {
	flags := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	defaultServeSettings().addFlags(flags)
	for _, key := range []string{
		"socket-dir", "pool", "config", "device", "socket-group", "allow-uid", "allow-gid", "integrity", "lease-bytes",
		"lookup",
		"http", "http-any", "log-level", "log-json", "drain-timeout",
	} {
		f := flags.Lookup(key)
		if f == nil || f.Usage == "" || f.Hidden {
			t.Errorf("--%s: %+v", key, f)
		}
	}
	if got := flags.Lookup("pool").DefValue; got != "1GiB" {
		t.Errorf("default pool %s", got)
	}
}
