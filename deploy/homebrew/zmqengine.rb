# A formula for a tap: brew install OWNER/TAP/zmqengine. `url` is that of a release's source archive. Its `sha256` is
# added once there is one: until then brew says that it cannot verify the archive.
# The worker's packages are wheels for Apple silicon: pip fetches them into a virtual environment of their own.
class Zmqengine < Formula
  desc "Share one GPU between many programs: an MLX inference worker that speaks ZeroMQ"
  homepage "https://pypi.org/project/zmqengine/"
  url "https://files.pythonhosted.org/packages/source/z/zmqengine/zmqengine-0.1.0.tar.gz"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--no-cache-dir", "#{buildpath}[worker,http,metrics,top]"
    bin.install_symlink libexec/"bin/zmqengine"
  end

  service do
    # Its own supervisor starts it again, but not what would fail again; launchd would, every few seconds.
    run [opt_bin/"zmqengine", "worker", "--log-format", "json"]
    keep_alive crashed: true
    throttle_interval 5
    process_type :interactive
    error_log_path var/"log/zmqengine-worker.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/zmqengine --version")
    # brew's sandbox has no GPU, so the worker has a fake engine.
    ENV["ZMQENGINE_DIR"] = testpath/"z"
    worker = spawn bin/"zmqengine", "worker", "--engine", "fake:{}", "--no-supervise"
    begin
      60.times do
        break if quiet_system bin/"zmqengine", "status", "--ready"

        sleep 1
      end
      system bin/"zmqengine", "status", "--ready"
    ensure
      Process.kill "TERM", worker
      Process.wait worker
    end
  end
end
