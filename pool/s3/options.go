package s3

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/kvagent/kvagent/pool/remote"
)

// Options of a store. The zero value of a field means its default where one is named.
type Options struct {
	Endpoint  string      // host or host:port of the service; default s3.amazonaws.com
	Insecure  bool        // HTTP instead of HTTPS
	TLS       *tls.Config // whom HTTPS trusts; nil: the system's authorities. None with Insecure or Transport
	Region    string      // empty: asked of the service
	PathStyle bool        // the bucket in the path instead of the host's name
	Bucket    string      // must be there already
	Prefix    string      // in front of every object's name, at most MaxPrefix bytes; default "kvagent/"

	// Keys to sign with. Without them those of the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN), then of the file that
	// AWS_SHARED_CREDENTIALS_FILE names (~/.aws/credentials), then of the machine's role.
	AccessKey, SecretKey, SessionToken string

	Concurrency int           // requests at once, 1 to 1,024; default 64
	RangeBytes  int           // objects above this are read in ranges of it at once, 1 MiB to 1 GiB; default 8 MiB
	DialTimeout time.Duration // 10 ms to 1 min; default 2 s
	// Transport, if set, makes the requests, for tests. The store does not close it.
	Transport http.RoundTripper
	// OnState is told when the store changes its state, and once, with the state as it is, that the keys may not list the bucket. It must not call the
	// store. Nil: nobody is.
	OnState remote.Told
}

// Limits of options.
const (
	MaxPrefix     = 256
	MinRangeBytes = 1 << 20
	MaxRangeBytes = 1 << 30
	maxValue      = 4 << 30 // bytes of an object; one PUT takes no more than 5 GiB
)

var bucketName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)

func (o *Options) complete() error {
	remote.Default(&o.Endpoint, "s3.amazonaws.com")
	remote.Default(&o.Prefix, "kvagent/")
	remote.Default(&o.Concurrency, 64)
	remote.Default(&o.RangeBytes, 8<<20)
	remote.Default(&o.DialTimeout, 2*time.Second)
	return errors.Join(
		o.checkNames(),
		remote.Between("s3", "Prefix", len(o.Prefix), 1, MaxPrefix),
		remote.Between("s3", "Concurrency", o.Concurrency, 1, 1024),
		remote.Between("s3", "RangeBytes", o.RangeBytes, MinRangeBytes, MaxRangeBytes),
		remote.Between("s3", "DialTimeout", o.DialTimeout, 10*time.Millisecond, time.Minute),
	)
}

func (o *Options) checkNames() error {
	switch {
	case !bucketName.MatchString(o.Bucket):
		return fmt.Errorf("s3: Bucket is %q, allowed: 3 to 63 lower-case letters, digits, dots and hyphens", o.Bucket)
	case strings.HasPrefix(o.Prefix, "/") || strings.Contains(o.Prefix, "//") || strings.Contains(o.Prefix, ".."):
		return fmt.Errorf("s3: Prefix is %q, allowed: one that does not begin with a slash, without empty or double-dot parts", o.Prefix)
	case strings.ContainsAny(o.Endpoint, "/@?#"):
		return fmt.Errorf("s3: Endpoint is %q, allowed: host or host:port", o.Endpoint)
	case o.TLS != nil && (o.Insecure || o.Transport != nil):
		return errors.New("s3: TLS and Insecure or Transport, allowed: one of them")
	case (o.AccessKey == "") != (o.SecretKey == ""):
		return fmt.Errorf("s3: AccessKey and SecretKey, allowed: both or none")
	}
	return nil
}

// client makes the library's client: one try for each request, since the callers have deadlines and count.
func (o *Options) client(transport http.RoundTripper) (*minio.Core, error) {
	lookup := minio.BucketLookupAuto
	if o.PathStyle {
		lookup = minio.BucketLookupPath
	}
	return minio.NewCore(o.Endpoint, &minio.Options{
		Creds: o.credentials(), Secure: !o.Insecure, Region: o.Region, BucketLookup: lookup, Transport: transport, MaxRetries: 1,
	})
}

func (o *Options) credentials() *credentials.Credentials {
	if o.AccessKey != "" {
		return credentials.NewStaticV4(o.AccessKey, o.SecretKey, o.SessionToken)
	}
	return credentials.NewChainCredentials([]credentials.Provider{
		&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{Client: &http.Client{Timeout: o.DialTimeout}},
	})
}
